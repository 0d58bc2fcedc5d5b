"""Event log, metrics, traces, explanations and the timeline: folds over the engine's records, which they never change.

Begin with `event_log.py` (the entries), `recorder.py` (how they are written) and `fold.py` (how they are interpreted);
the other modules read the fold's timelines and changes.
"""
