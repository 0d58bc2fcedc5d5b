"""The timeline: a page that draws the batch of each step, from a live server or a saved event log."""
