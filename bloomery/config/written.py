"""YAML that people write: read to its end or refused, and never with something left out of it without a word."""

import math
import re
from collections import Counter
from typing import Any, Final

import yaml


def read_yaml(text: str | bytes) -> Any:
    """What it says; ValueError says why it is none."""
    try:
        return yaml.load(text, _Whole)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, AttributeError):
        # What PyYAML's own constructors raise, of `!!bool maybe` say.
        raise ValueError("a value is none of the type that its tag (`!!`) names") from None
    except RecursionError:
        raise ValueError("it goes too deep to be read") from None


class _Whole(yaml.SafeLoader):  # type: ignore[misc]
    """Of what a mapping has twice under one name others take the last alone."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        # Before merges (`<<`), which do have names twice: there the mapping's own goes before.
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        times = Counter(key.value for key in keys)
        for key in keys:
            if times[key.value] > 1:
                raise yaml.MarkedYAMLError(problem=f"`{key.value}` stands there more than once: leave one of them", problem_mark=key.start_mark)
        return node

    def construct_yaml_float(self, node: Any) -> float | str:
        """A number that no float can hold stays the text that it is; infinity is written `.inf`."""
        value = float(super().construct_yaml_float(node))
        return str(node.value) if math.isinf(value) and not node.value.lower().endswith(".inf") else value


_FLOAT: Final = "tag:yaml.org,2002:float"
# To YAML 1.1 a number without a point is a text, however it goes on; to YAML 1.2, and to whoever writes a learning rate, 1e-3 is one. No float has an
# exponent of more digits, and hashes may look as if they had.
_Whole.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}$"), list("-+0123456789"))
_Whole.add_constructor(_FLOAT, _Whole.construct_yaml_float)
