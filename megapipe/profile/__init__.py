"""Pipeline profiles, compared with the plan. Imports no torch, so profiles can be read on any machine.

- `profile`:    what --profile-pipeline writes: start and end of every action of every rank, as versioned JSON;
  conversion of times between the clocks of different ranks, from round trips of messages
- `comparison`: plan and measurement of a step; means over the steps of a profile as a table of planned beside measured,
  and the text printed at the end of --profile-pipeline
- `trace`:      Chrome traces of a profile and of a simulated timeline
"""
