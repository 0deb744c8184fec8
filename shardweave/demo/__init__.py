"""The main job: a small GPT trains on local ranks with a planned, generated step."""
