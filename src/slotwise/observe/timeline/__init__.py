"""The timeline: one page that draws a batch as it is rebuilt, from a live server or a saved event log."""
