"""The passes: GraphModule in, GraphModule out, one file each."""
