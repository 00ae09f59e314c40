"""One page that tells a run, from what the run left in its folder; needs no torch, no network and not the run's end.

folder         the records of a run: segments, steps, evaluations, notes, profile, configuration
settings       what a configuration sets, and where it differs from the defaults
chart          a chart as SVG; curves: those of a run
pipeline       plan and measurement, and where the difference went
about          grid, configuration, starts and endings, versions
page           the HTML page, with page.css and page.js written into it
"""
