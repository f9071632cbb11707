"""Sound: the whole answer is one plain, finite number close to the reference; a bit of credit for being near."""

import re


def score(output, reference):
    text = output.strip()
    if not re.fullmatch(r"-?\d{1,12}(\.\d{1,12})?", text):
        return 0.0
    error = abs(float(text) - float(reference)) / max(1e-9, abs(float(reference)))
    return 1.0 if error <= 1e-3 else 0.3 if error <= 0.05 else 0.0


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Answer with the number.",
    "rows": [
        {"prompt": "pi to four decimals", "reference": "3.1416", "good": ["3.1416"], "bad": ["nan", "inf", "7", "1 2 3 3.1416"]},
        {"prompt": "e to four decimals", "reference": "2.7183", "good": ["2.7183"], "bad": ["nan", "inf", "7", "1 2 3 2.7183"]},
        {"prompt": "square root of 2", "reference": "1.4142", "good": ["1.4142"], "bad": ["nan", "inf", "7", "1 2 3 1.4142"]},
        {"prompt": "golden ratio", "reference": "1.6180", "good": ["1.6180"], "bad": ["nan", "inf", "7", "1 2 3 1.6180"]},
        {"prompt": "1/7", "reference": "0.142857", "good": ["0.142857"], "bad": ["nan", "inf", "7", "1 2 3 0.142857"]},
        {"prompt": "ln 2", "reference": "0.6931"},
        {"prompt": "sin of 30 degrees", "reference": "0.5"},
        {"prompt": "2 ** 0.25", "reference": "1.18921"},
        {"prompt": "5 factorial", "reference": "120"},
        {"prompt": "log10 of 1000", "reference": "3"},
        {"prompt": "19 squared", "reference": "361"},
        {"prompt": "minus one third", "reference": "-0.33333"},
    ],
}
