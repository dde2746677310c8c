"""The rendezvous store, kept by the hub: a key that is never set is reported at once, instead of after a timeout."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tonnage.virtual.cluster.exchange import Exchange


class HubStore(dist.Store):
    """A `torch.distributed.Store` over the connection to the hub. Stores of the same name share their keys."""

    def __init__(self, exchange: Exchange, line: Callable[[], str], name: str = "") -> None:
        super().__init__()
        self.exchange, self.line, self._name = exchange, line, name

    def _ask(self, action: str, key: str, value: Any = None) -> Any:
        return self.exchange.look_up(action, self._name + key, value)

    def set(self, key: str, value: Any) -> None:
        self.exchange.keep(self._name + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is set."""
        found: bytes = self._ask("get", key, self.line())
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the new count."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the key if its value is `expected` ("" means not set), and return the value afterwards."""
        here = self.get(key) if self.check([key]) else b""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if here != wanted:
            return here or wanted
        self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", key, self.line()) for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return 0: keys are not counted."""
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: nothing times out here."""
