"""Several replicas of a model behind one address: a front door with a router, and the processes behind it.

    client ─► door ─► router (core.routing) ─► replica 0: slotwise serve
                └─ polls GET /replica ─────────► replica 1: slotwise serve

`forward.py` is the path of one request, `upstream.py` a replica seen from here, `replicas.py` all of them with their
processes, `door.py` what they have in common, `door_routes.py` the routes.  `app` is the same on Ray Serve
(`ray_app.py`), which only that needs.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`slotwise.fleet:app`, the application on Ray Serve."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slotwise.fleet.ray_app import app

    return app
