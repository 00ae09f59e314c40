"""Pictures of a schedule and of its timeline: the plan and, given measured times, what really happened, on the same axes.

grid    the rank x slot grid, or the timeline to scale, as text for a terminal
svg     the timeline as a drawing: one lane a rank, a box an action, numbered by microbatch, with what is held under each lane
beside  plan and measurement of a profiled step on one axis, as a drawing
trace   a timeline, or a whole profile, as Chrome trace JSON for Perfetto
"""
