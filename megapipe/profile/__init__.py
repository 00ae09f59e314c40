"""Pipeline profiles. `megapipe.extras.report` reads them and compares them with the plan.

- `profile`: what --profile-pipeline writes: start and end of every action of every rank, as versioned JSON; conversion
  of times between the clocks of different ranks, from round trips of messages
"""
