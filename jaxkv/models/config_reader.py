"""Reads a model's config.json: every value is checked, and every error says where it is."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxkv.config import is_int
from jaxkv.errors import CheckpointError

MAX_SIZE = 2**24
MAX_LAYERS = 2**12
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30
"""Bounds of every other number: inside float32's range with room to divide."""


class ConfigReader:
    """config.json with checked access: every error says where it is, the key, what was expected and
    what came.

    A key that is null counts as absent: the reader's `default` holds. `asked`: the keys that were
    asked for, each with those that its section was asked for.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        names: Mapping[str, str] | None = None,
        asked: dict[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.asked: dict[str, Any] = {} if asked is None else asked
        self._names: Mapping[str, str] = names or {}

    def fail(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {self._names.get(key, key)}: expected {expected}, got "
            f"{reprlib.repr(self.get(key))}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        name = self._names.get(key, key)
        self.asked.setdefault(name, {})
        value = self.values.get(name)
        return default if value is None else value

    def size(
        self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_SIZE
    ) -> int:
        """Reads a whole number from `at_least` to `at_most`."""
        value = self.get(key, default)
        if not is_int(value) or not at_least <= value <= at_most:
            raise self.fail(key, f"a whole number from {at_least} to {at_most}")
        return value

    @property
    def num_layers(self) -> int:
        """Reads how many layers the model has."""
        return self.size("num_hidden_layers", at_most=MAX_LAYERS)

    @property
    def max_len(self) -> int:
        """Reads how long sequences may get."""
        return self.size("max_position_embeddings", 2048)

    @property
    def head_dim(self) -> int:
        """Reads the size of a head, by default its part of the hidden size."""
        part = self.size("hidden_size") // self.size("num_attention_heads")
        return self.size("head_dim", max(1, part))

    def number(
        self, key: str, default: float | None = None, *, at_least: float = MIN_NUMBER
    ) -> float:
        """Reads a number from `at_least` to 1e30."""
        value = self.get(key, default)
        if not (is_int(value) or isinstance(value, float)) or not at_least <= value <= MAX_NUMBER:
            raise self.fail(key, f"a number from {at_least:g} to {MAX_NUMBER:g}")
        return float(value)

    def cap(self, key: str) -> float:
        """Reads a bound, 0 if it is absent or null."""
        return 0.0 if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false. Null is refused where the default is true: transformers, which
        takes the default for an absent key only, computes as if it were false.
        """
        value = self.get(key, default)
        is_null = self.values.get(self._names.get(key, key), default) is None
        if (is_null and default) or not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def section(self, key: str) -> ConfigReader:
        """Reads the object under `key`, empty if there is none, as a reader of its own."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        asked = self.asked[self._names.get(key, key)]
        return ConfigReader(value, f"{self.where}: {key}", asked=asked)

    def by_layer(self, key: str, known: Collection[str]) -> list[ConfigReader]:
        """Reads what the object under `key` says of each layer by its number, which is nothing of
        those that it does not name. known: the keys that it may have of a layer.
        """
        section, num_layers = self.section(key), self.num_layers
        found = [ConfigReader({}, section.where) for _ in range(num_layers)]
        for number in section.values:  # transformers writes "07" where there are more than 10
            layer = int(number) if number.isdecimal() and len(number) <= 6 else num_layers
            if layer >= num_layers:
                raise self.fail(key, f"an object with numbers below {num_layers} as its keys")
            found[layer] = section.section(number)
            if found[layer].values.keys() - set(known):
                raise self.fail(key, f"{', '.join(known)} only")
        return found

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Reads a list of so many numbers from 1e-30 to 1e30."""
        given = self.get(key)
        if not isinstance(given, list) or len(given) != count:
            raise self.fail(key, f"a list of {count} numbers")
        return tuple(ConfigReader({key: one}, self.where).number(key) for one in given)

    def kinds(
        self, key: str, count: int, known: Sequence[str], default: list[str] | None = None
    ) -> list[str]:
        """Reads a list of so many of the known texts."""
        given = self.get(key, default)
        known = sorted(known)
        if (
            not isinstance(given, list)
            or len(given) != count
            or not all(isinstance(one, str) and one in known for one in given)
        ):
            raise self.fail(key, f"a list of {count} out of {known}")
        return given

    def whole_numbers(
        self,
        key: str,
        default: list[int] | None = None,
        *,
        at_least: int = 0,
        at_most: int = MAX_SIZE,
    ) -> list[int]:
        """Reads a list of whole numbers from `at_least` to `at_most`."""
        given = self.get(key, default)
        if not isinstance(given, list) or not all(
            is_int(one) and at_least <= one <= at_most for one in given
        ):
            raise self.fail(key, f"a list of whole numbers from {at_least} to {at_most}")
        return given

    def choice(self, key: str, default: str | None, known: Collection[str]) -> str:
        """Reads one of the known texts."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.fail(key, f"one of {', '.join(sorted(known))}")
        return value

    def refuse(self, key: str, *harmless: Any) -> None:
        """Raises for a value that asks for what is not built; null and absent ask for nothing."""
        value = self.get(key)
        if value is not None and not any(value == one for one in harmless):
            raise self.fail(key, f"{' or '.join(map(str, harmless)) or 'none'} (not built)")

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """Returns a reader that finds these where the file has no such key."""
        return ConfigReader({**defaults, **self.values}, self.where, self._names, self.asked)

    def replaced(self, **values: Any) -> ConfigReader:
        """Returns a reader that finds these whatever the file has."""
        return ConfigReader({**self.values, **values}, self.where, self._names, self.asked)

    def renamed(self, **names: str) -> ConfigReader:
        """Returns a reader that finds under a name what the file has under another."""
        return ConfigReader(self.values, self.where, names, self.asked)
