"""Each endpoint's parameters name parts of the service, of the types that it says."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

from api.test_containment import scenario

from slotwise.api.app import ROUTES
from slotwise.api.asgi import WHOLE, App


def test_endpoints_receive_the_parts_that_they_name(folder: Path) -> None:
    async def check(app: App[typing.Any], _client: object) -> None:
        for _, path, endpoint in ROUTES:
            hints = typing.get_type_hints(endpoint)
            *names, exchange = inspect.signature(endpoint).parameters
            assert exchange == "exchange", path
            for name in names:
                part = app.api if name in WHOLE else getattr(app.api, name)
                assert isinstance(part, hints[name]), f"{path}: {name} is a {type(part).__name__}"

    scenario(folder, check)
