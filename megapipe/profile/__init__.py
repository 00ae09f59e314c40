"""What really happened in the pipeline, beside what was planned. Imports no torch: a profile is read and compared on any machine.

clock       one time line for ranks with clocks of their own, from messages that went to and fro
profile     what --profile-pipeline writes: start and end of every action of every rank, as versioned JSON
replay      a row of actions run again with the times that each of them took
record      from the events of a tracer to the measured row of a rank
difference  predicted and measured bubble, and where the difference went
summary     the numbers of a profile, and the same in words for the console
"""
