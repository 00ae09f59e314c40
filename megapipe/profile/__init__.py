"""Pipeline profiles, compared with the plan. `megapipe.extras.report` reads and draws them.

- `profile`:    what --profile-pipeline writes: start and end of every action of every rank, as versioned JSON;
  conversion of times between the clocks of different ranks, from round trips of messages
- `comparison`: plan and measurement of a step; means over the steps of a profile as a table of planned beside measured,
  and the text printed at the end of --profile-pipeline
- `trace`:      a profile as a Chrome trace
"""
