"""Sound: a process of its own only computes; the results come back as JSON and are compared out here, with what that process never sees.

An early exit gives no results, an object with an `__eq__` of its own does not survive JSON, and there are no asserts to overwrite.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HARNESS = """
import json, sys
source, entry, calls = json.load(sys.stdin)
namespace = {"__name__": "answer"}
exec(compile(source, "answer", "exec"), namespace)
print(json.dumps([namespace[entry](*arguments) for arguments in calls]))
"""


def score(output, reference, item):
    blocks = re.findall(r"```(?:python)?\n(.*?)```", output, re.DOTALL)
    if len(blocks) != 1:
        return 0.0
    calls = [arguments for arguments, _ in item["cases"]]
    with tempfile.TemporaryDirectory() as folder:
        harness = Path(folder) / "harness.py"
        harness.write_text(HARNESS)
        command = [sys.executable, "-I", str(harness)]
        given = json.dumps([blocks[0], item["entry"], calls])
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=10, cwd=folder, check=False)
        except subprocess.TimeoutExpired:
            return 0.0
    if done.returncode != 0:
        return 0.0
    try:
        results = json.loads(done.stdout)
    except json.JSONDecodeError:
        return 0.0
    # As JSON, since Python holds True and 1 to be equal.
    return 1.0 if json.dumps(results) == json.dumps([expected for _, expected in item["cases"]]) else 0.0


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "runs_code": True,
    "system": "Write the Python function. Answer with one code block.",
    "rows": [
        {
            "prompt": "count_words(text): the number of words, which white space separates.",
            "reference": "def count_words(text):\n    return len(text.split())",
            "item": {"entry": "count_words", "cases": [[["a b  c"], 3], [[""], 0], [[" x "], 1]]},
            "good": ["```python\ndef count_words(text):\n    return len(text.split())\n```"],
            "bad": [
                "```python\ndef count_words(text):\n    return len(text.split(' '))\n```",
                "```python\nimport sys\nsys.exit(0)\n```",
                "```python\nclass A(int):\n    def __eq__(self, o): return True\n\ndef count_words(text):\n    return A()\n```",
            ],
        },
        {
            "prompt": "median(xs) of a list of integers that is not empty; the lower one of two.",
            "reference": "def median(xs):\n    return sorted(xs)[(len(xs) - 1) // 2]",
            "item": {"entry": "median", "cases": [[[[3, 1, 2]], 2], [[[4, 1, 3, 2]], 2], [[[7]], 7]]},
            "good": ["Sort, then take the middle:\n```python\ndef median(xs):\n    ys = sorted(xs)\n    return ys[(len(ys) - 1) // 2]\n```"],
            "bad": ["```python\ndef median(xs):\n    return xs[len(xs) // 2]\n```", "Sort it and take the middle."],
        },
        {
            "prompt": "title(s): each word begins with a capital, all else is lower case; one space between words.",
            "reference": "def title(s):\n    return ' '.join(w.capitalize() for w in s.split())",
            "item": {"entry": "title", "cases": [[["hELLO  world"], "Hello World"], [["don't"], "Don't"]]},
            "good": ["```python\ndef title(s):\n    return ' '.join(w[0].upper() + w[1:].lower() for w in s.split())\n```"],
            "bad": ["```python\ndef title(s):\n    return s.title()\n```"],
        },
        {
            "prompt": "primes(n): all primes up to and with n.",
            "reference": "def primes(n):\n    return [p for p in range(2, n + 1) if all(p % d for d in range(2, p))]",
            "item": {"entry": "primes", "cases": [[[10], [2, 3, 5, 7]], [[1], []], [[13], [2, 3, 5, 7, 11, 13]]]},
        },
        {
            "prompt": "common(a, b): the sorted distinct elements that both lists have.",
            "reference": "def common(a, b):\n    return sorted(set(a) & set(b))",
            "item": {"entry": "common", "cases": [[[[1, 2, 2], [2, 3]], [2]], [[[5], [6]], []]]},
            "good": ["```python\ndef common(a, b):\n    return sorted(set(a).intersection(b))\n```"],
            "bad": ["```python\ndef common(a, b):\n    return [x for x in a if x in b]\n```"],
        },
        {
            "prompt": "clamp(x, low, high)",
            "reference": "def clamp(x, low, high):\n    return max(low, min(x, high))",
            "item": {"entry": "clamp", "cases": [[[5, 0, 3], 3], [[-1, 0, 3], 0], [[2, 0, 3], 2]]},
        },
        {
            "prompt": "collatz(n): how many steps until n is 1.",
            "reference": "def collatz(n):\n    k = 0\n    while n != 1:\n        n, k = (n // 2 if n % 2 == 0 else 3 * n + 1), k + 1\n    return k",
            "item": {"entry": "collatz", "cases": [[[1], 0], [[6], 8], [[27], 111]]},
        },
        {
            "prompt": "is_anagram(a, b), ignoring case and spaces.",
            "reference": "def is_anagram(a, b):\n    f = lambda s: sorted(s.lower().replace(' ', ''))\n    return f(a) == f(b)",
            "item": {"entry": "is_anagram", "cases": [[["Dormitory", "dirty room"], True], [["abc", "abd"], False]]},
        },
        {
            "prompt": "diagonal(rows): the sum of the main diagonal of a square.",
            "reference": "def diagonal(rows):\n    return sum(r[i] for i, r in enumerate(rows))",
            "item": {"entry": "diagonal", "cases": [[[[[1, 2], [3, 4]]], 5], [[[[7]]], 7]]},
        },
        {
            "prompt": "snake(name): CamelCase to snake_case.",
            "reference": "def snake(n):\n    return ''.join('_' * (i > 0) + c.lower() if c.isupper() else c for i, c in enumerate(n))",
            "item": {"entry": "snake", "cases": [[["CamelCase"], "camel_case"], [["A"], "a"]]},
        },
        {
            "prompt": "top(counts): the key of the greatest value, the first in the alphabet of several.",
            "reference": "def top(counts):\n    return min(counts, key=lambda k: (-counts[k], k))",
            "item": {"entry": "top", "cases": [[[{"b": 2, "a": 2, "c": 1}], "a"], [[{"z": 1}], "z"]]},
        },
        {
            "prompt": "minutes(a, b): from HH:MM to HH:MM of the same or the next day.",
            "reference": "def minutes(a, b):\n    f = lambda t: int(t[:2]) * 60 + int(t[3:])\n    return (f(b) - f(a)) % 1440",
            "item": {"entry": "minutes", "cases": [[["09:40", "11:15"], 95], [["23:50", "00:10"], 20]]},
        },
    ],
}
