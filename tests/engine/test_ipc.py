"""The engine's end of the socket pair."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from slotwise.engine.ipc import BlockingChannel, ChannelClosed, frame, pair

HIGH = 2000  # a descriptor beyond those that select() can wait for


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 1), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_may_have_any_number(many_files: None) -> None:
    ours, theirs = pair()
    os.dup2(theirs.fileno(), HIGH)
    theirs.close()
    channel = BlockingChannel(socket.socket(fileno=HIGH))
    assert channel.receive(0.0) == [] == channel.receive(0.01)
    ours.sendall(frame(b"hello"))
    assert channel.receive(None) == [b"hello"]
    ours.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None)
