"""What this machine does, measured for the planner.

- `layers`: seconds of embedding, layers and head of a configuration, for the cut (`megapipe profile-layers`)
"""
