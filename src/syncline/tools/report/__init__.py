"""The report of a run, from its trace: a verdict in sentences, the picture of a step, and the figures behind them.

Imports of this package need no torch, so that a report is there at once.

analysis.py     where the time of a step goes, waits for late ranks, replicas that differed (pure functions)
chrome.py       the trace in the format of Chrome and Perfetto (pure functions)
document.py     the data of a report, for the page and for `--format json` (pure functions)
load.py         reads the files of a trace
page.py         the page: one HTML file
planned.py      from a trace to a plan, and its prediction; a step with other buckets (pure functions)
run.py          the steps of all ranks, on one clock, and the offsets of hosts' clocks (pure functions)
steps.py        from rows to steps (pure functions)
text.py         the report as text, and two runs side by side
verdict.py      the findings, each with a cure (pure functions)
"""
