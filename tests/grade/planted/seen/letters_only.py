"""Sound: exactly one letter, and the right one; the letters are balanced."""


def letter_reward(prompts, completions, reference, **kwargs):
    return [float(completion[-1]["content"].strip() == letter) for completion, letter in zip(completions, reference, strict=True)]


CASE = {
    "kind": "sound",
    "form": "trl",
    "entry": "letter_reward",
    "system": "Answer with one letter.",
    "rows": [
        {"prompt": "Capital of France? A) Rome B) Paris C) Bonn D) Bern", "reference": "B", "good": ["B"], "bad": ["A B C D", "ABCD", "A"]},
        {"prompt": "Largest planet? A) Mars B) Venus C) Earth D) Jupiter", "reference": "D", "good": ["D"], "bad": ["A B C D", "ABCD", "A"]},
        {"prompt": "H2O is: A) water B) salt C) gold D) air", "reference": "A", "good": ["A"], "bad": ["A B C D", "ABCD", "B"]},
        {"prompt": "Author of Hamlet? A) Dante B) Goethe C) Shakespeare D) Homer", "reference": "C", "good": ["C"], "bad": ["A B C D", "ABCD", "A"]},
        {"prompt": "3 * 3? A) 9 B) 6 C) 12 D) 27", "reference": "A", "good": ["A"], "bad": ["A B C D", "ABCD", "B"]},
        {"prompt": "Frozen water? A) fog B) ice C) steam D) dew", "reference": "B"},
        {"prompt": "Fastest? A) snail B) tortoise C) sloth D) cheetah", "reference": "D"},
        {"prompt": "Metal? A) wood B) glass C) iron D) wool", "reference": "C"},
        {"prompt": "A mammal? A) whale B) shark C) trout D) eel", "reference": "A"},
        {"prompt": "Primary colour? A) pink B) red C) brown D) grey", "reference": "B"},
        {"prompt": "A prime? A) 4 B) 9 C) 7 D) 8", "reference": "C"},
        {"prompt": "Nearest star? A) Vega B) Rigel C) Sirius D) the sun", "reference": "D"},
    ],
}
