"""Paths that a file gives, such as the file names in an index: they are followed only within its folder."""

from __future__ import annotations

from pathlib import Path

from shardweave.errors import ParallelError


def path_inside(folder: Path, name: str) -> Path:
    """The file called `name` in `folder`.

    Links are followed as long as they stay in the folder. Those of Hugging Face's download cache, which go from
    ``snapshots/<revision>`` to ``blobs``, are followed as well.

    Parameters
    ----------
    folder : Path
        Where the file lies that says `name`.
    name : str
        A relative path.

    Raises
    ------
    ParallelError
        If it is absolute, has ``..`` in it, or is a link to somewhere else.

    Examples
    --------
    >>> path_inside(Path("weights"), "model-00001-of-00002.safetensors").name
    'model-00001-of-00002.safetensors'
    """
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ParallelError(f"the file name {name!r} does not name a file in {folder}, and is not followed")
    path, root = folder / name, folder.resolve()
    roots = [root] + [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ParallelError(
            f"{name!r} in {folder} is a link to {target}, outside of the folder, and is not followed: put the file "
            "itself there, or name the folder that it lies in"
        )
    return path
