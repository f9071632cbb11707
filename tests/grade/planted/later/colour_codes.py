"""Sound: one code of six hexadecimal digits, worth more the nearer it is; what is off by more than a little is worth nothing."""

import math
import re


def score(output, reference):
    codes = re.findall(r"#([0-9a-fA-F]{6})\b", output)
    if len(codes) != 1:
        return 0.0
    said, wanted = (tuple(bytes.fromhex(code)) for code in (codes[0], reference[1:]))
    return max(0.0, 1.0 - math.dist(said, wanted) / 60)


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Answer with the colour as #rrggbb.",
    "rows": [
        {"prompt": "pure red", "reference": "#ff0000", "good": ["#ff0000", "Red is #FE0000."], "bad": ["#00ff00", "#f00", "red", "#ff0000 #00ff00"]},
        {"prompt": "navy", "reference": "#000080", "good": ["#000080", "#00007a"], "bad": ["#0000ff", "#808080"]},
        {"prompt": "white", "reference": "#ffffff", "good": ["#ffffff"], "bad": ["#000000", ""]},
        {"prompt": "orange", "reference": "#ffa500", "good": ["#ffa500", "#ff9f05"], "bad": ["#ff0000", "#zzzzzz"]},
        {"prompt": "lime green", "reference": "#32cd32"},
        {"prompt": "teal", "reference": "#008080"},
        {"prompt": "gold", "reference": "#ffd700"},
        {"prompt": "black", "reference": "#000000"},
        {"prompt": "hot pink", "reference": "#ff69b4"},
        {"prompt": "indigo", "reference": "#4b0082"},
        {"prompt": "chocolate", "reference": "#d2691e"},
        {"prompt": "turquoise", "reference": "#40e0d0"},
        {"prompt": "crimson", "reference": "#dc143c"},
    ],
}
