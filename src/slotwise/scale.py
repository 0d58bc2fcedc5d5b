"""`slotwise.scale:app`: the application on Ray Serve under its first name; it is `slotwise.fleet:app`."""

from slotwise.fleet import app as app
