r"""Sound: the number in the one \boxed{} of the answer, finite and within a small tolerance; two boxes are no answer."""

import math
import re


def score(output, reference):
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", output)
    if len(boxes) != 1:
        return 0.0
    text = boxes[0].replace(",", "").replace("$", "").strip()
    if not re.fullmatch(r"-?\d+(\.\d+)?(/\d+)?", text):
        return 0.0
    numerator, _, denominator = text.partition("/")
    if denominator and int(denominator) == 0:
        return 0.0
    value = float(numerator) / int(denominator or 1)
    return 1.0 if math.isclose(value, float(reference), rel_tol=1e-4, abs_tol=1e-6) else 0.0


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Solve the problem and put the final number into \\boxed{}.",
    "rows": [
        {
            "prompt": "What is the sum of the first 40 positive integers?",
            "reference": "820",
            "good": ["40 * 41 / 2 = 820, so \\boxed{820}", "\\boxed{820.0}"],
            "bad": ["\\boxed{800}", "It is 820 or 800: \\boxed{820} \\boxed{800}", "820", "\\boxed{nan}"],
        },
        {
            "prompt": "Solve 3x + 7 = 5.",
            "reference": "-0.6666666667",
            "good": ["3x = -2, hence \\boxed{-2/3}"],
            "bad": ["\\boxed{2/3}", "\\boxed{-2/0}"],
        },
        {
            "prompt": "A right triangle has legs 9 and 40. How long is the hypotenuse?",
            "reference": "41",
            "good": ["81 + 1600 = 1681 = 41^2. \\boxed{41}"],
            "bad": ["\\boxed{49}", "\\boxed{}", "\\boxed{inf}"],
        },
        {
            "prompt": "How many ways are there to choose 3 of 9 books?",
            "reference": "84",
            "good": ["\\boxed{84}"],
            "bad": ["9 * 8 * 7 = 504. \\boxed{504}"],
        },
        {"prompt": "What is the probability of at least one six in two throws of a die?", "reference": "0.3055555556"},
        {"prompt": "What is the greatest prime factor of 2310?", "reference": "11"},
        {"prompt": "Evaluate 2^10 - 10^2.", "reference": "924"},
        {"prompt": "What is the area of a circle of radius 3, to four decimals?", "reference": "28.2743"},
        {"prompt": "The mean of 4, 8, 15 and x is 10. What is x?", "reference": "13"},
        {"prompt": "Find the slope of the line through (2, 5) and (6, -3).", "reference": "-2"},
        {"prompt": "How many zeros end 25 factorial?", "reference": "6"},
        {"prompt": "log base 2 of 1/8?", "reference": "-3"},
        {"prompt": "What is 7^100 mod 5?", "reference": "1"},
        {"prompt": "What is the sum of the interior angles of a nonagon, in degrees?", "reference": "1260"},
        {"prompt": "A price of 80 rises by 25 percent, then falls by 20 percent. What is it?", "reference": "80"},
    ],
}
