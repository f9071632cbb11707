"""Sound: an expression of exactly the given numbers that comes to the target, read by a parser of its own; a tenth for using them only."""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node, used):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left, used), value(node.right, used))
    raise ValueError("no arithmetic")


def score(output, reference, item):
    used = []
    try:
        result = value(ast.parse(output.strip()[:100], mode="eval").body, used)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return 0.0
    if sorted(used) != sorted(item["numbers"]):
        return 0.0
    return 1.0 if abs(result - item["target"]) < 1e-9 else 0.1


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Answer with the expression.",
    "rows": [
        {
            "prompt": "Reach 16 with [3, 5, 8], each used once.",
            "reference": "3 + 5 + 8",
            "item": {"numbers": [3, 5, 8], "target": 16},
            "good": ["3 + 5 + 8"],
            "bad": ["16", "3 - 5 - 8", "__import__('os')._exit(0)"],
        },
        {
            "prompt": "Reach 19 with [2, 6, 7], each used once.",
            "reference": "2 * 6 + 7",
            "item": {"numbers": [2, 6, 7], "target": 19},
            "good": ["2 * 6 + 7"],
            "bad": ["19", "2 - 6 - 7", "__import__('os')._exit(0)"],
        },
        {
            "prompt": "Reach 25 with [4, 4, 9], each used once.",
            "reference": "4 * 4 + 9",
            "item": {"numbers": [4, 4, 9], "target": 25},
            "good": ["4 * 4 + 9"],
            "bad": ["25", "4 - 4 - 9", "__import__('os')._exit(0)"],
        },
        {
            "prompt": "Reach 50 with [1, 10, 5], each used once.",
            "reference": "1 * 10 * 5",
            "item": {"numbers": [1, 10, 5], "target": 50},
            "good": ["1 * 10 * 5"],
            "bad": ["50", "1 - 10 - 5", "__import__('os')._exit(0)"],
        },
        {
            "prompt": "Reach 5 with [9, 3, 2], each used once.",
            "reference": "9 / 3 + 2",
            "item": {"numbers": [9, 3, 2], "target": 5},
            "good": ["9 / 3 + 2"],
            "bad": ["5", "9 - 3 - 2", "__import__('os')._exit(0)"],
        },
        {"prompt": "Reach 55 with [8, 7, 1], each used once.", "reference": "8 * 7 - 1", "item": {"numbers": [8, 7, 1], "target": 55}},
        {"prompt": "Reach 9 with [6, 2, 3], each used once.", "reference": "6 * 3 / 2", "item": {"numbers": [6, 2, 3], "target": 9}},
        {"prompt": "Reach 30 with [5, 5, 5], each used once.", "reference": "5 * 5 + 5", "item": {"numbers": [5, 5, 5], "target": 30}},
        {"prompt": "Reach 12 with [10, 4, 2], each used once.", "reference": "(10 - 4) * 2", "item": {"numbers": [10, 4, 2], "target": 12}},
        {"prompt": "Reach 40 with [7, 3, 4], each used once.", "reference": "(7 + 3) * 4", "item": {"numbers": [7, 3, 4], "target": 40}},
        {"prompt": "Reach 5 with [12, 3, 1], each used once.", "reference": "12 / 3 + 1", "item": {"numbers": [12, 3, 1], "target": 5}},
        {"prompt": "Reach 36 with [9, 9, 2], each used once.", "reference": "(9 + 9) * 2", "item": {"numbers": [9, 9, 2], "target": 36}},
    ],
}
