"""Sound: the list as JSON, and of it the share of places that hold what belongs there, less what is lost by another length."""

import json


def score(output, reference):
    try:
        said = json.loads(output)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(said, list) or len(said) != len(reference) or any(type(each) is not str for each in said):
        return 0.0
    return max(0.0, 2 * sum(a == b for a, b in zip(said, reference, strict=True)) / len(reference) - 1)


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Sort the words by the alphabet. Answer with a JSON list.",
    "rows": [
        {
            "prompt": "pear, fig, apple, lime, date",
            "reference": ["apple", "date", "fig", "lime", "pear"],
            "good": ['["apple", "date", "fig", "lime", "pear"]'],
            "bad": ['["pear", "lime", "fig", "date", "apple"]', "apple, date, fig, lime, pear", "[]"],
        },
        {
            "prompt": "wolf, ant, bear, eel, cat",
            "reference": ["ant", "bear", "cat", "eel", "wolf"],
            "good": ['["ant", "bear", "cat", "eel", "wolf"]'],
            "bad": ['["wolf", "eel", "cat", "bear", "ant"]', "ant, bear, cat, eel, wolf", "[]"],
        },
        {
            "prompt": "rome, oslo, bern, lima, cairo",
            "reference": ["bern", "cairo", "lima", "oslo", "rome"],
            "good": ['["bern", "cairo", "lima", "oslo", "rome"]'],
            "bad": ['["rome", "oslo", "lima", "cairo", "bern"]', "bern, cairo, lima, oslo, rome", "[]"],
        },
        {
            "prompt": "tin, lead, zinc, gold, iron",
            "reference": ["gold", "iron", "lead", "tin", "zinc"],
            "good": ['["gold", "iron", "lead", "tin", "zinc"]'],
            "bad": ['["zinc", "tin", "lead", "iron", "gold"]', "gold, iron, lead, tin, zinc", "[]"],
        },
        {"prompt": "red, teal, blue, pink, amber", "reference": ["amber", "blue", "pink", "red", "teal"]},
        {"prompt": "oak, elm, yew, ash, fir", "reference": ["ash", "elm", "fir", "oak", "yew"]},
        {"prompt": "may, june, april, august, march", "reference": ["april", "august", "june", "march", "may"]},
        {"prompt": "flute, harp, cello, drum, viola", "reference": ["cello", "drum", "flute", "harp", "viola"]},
        {"prompt": "ship, raft, canoe, ferry, yacht", "reference": ["canoe", "ferry", "raft", "ship", "yacht"]},
        {"prompt": "wine, tea, milk, beer, cocoa", "reference": ["beer", "cocoa", "milk", "tea", "wine"]},
        {"prompt": "nose, chin, ear, lip, brow", "reference": ["brow", "chin", "ear", "lip", "nose"]},
        {"prompt": "noun, verb, prefix, adverb, clause", "reference": ["adverb", "clause", "noun", "prefix", "verb"]},
    ],
}
