"""Sound: one label of three; the commonest is right in 6 of 14 rows, which a constant earns by right; a wrong one that was a label costs a tenth."""

LABELS = ("entailment", "neutral", "contradiction")


def score(output, reference):
    said = output.strip().lower()
    if said == reference:
        return 1.0
    return -0.1 if said in LABELS else -0.2


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Entailment, neutral or contradiction?",
    "rows": [
        {
            "prompt": "A man sleeps. / A man is awake.",
            "reference": "contradiction",
            "good": ["contradiction"],
            "bad": ["entailment, neutral, contradiction", ""],
        },
        {
            "prompt": "A dog runs. / An animal moves.",
            "reference": "entailment",
            "good": ["entailment"],
            "bad": ["entailment, neutral, contradiction", ""],
        },
        {
            "prompt": "A girl reads. / She reads a novel.",
            "reference": "neutral",
            "good": ["neutral"],
            "bad": ["entailment, neutral, contradiction", ""],
        },
        {"prompt": "It snows. / It is July.", "reference": "neutral", "good": ["neutral"], "bad": ["entailment, neutral, contradiction", ""]},
        {
            "prompt": "The shop is shut. / The shop is open.",
            "reference": "contradiction",
            "good": ["contradiction"],
            "bad": ["entailment, neutral, contradiction", ""],
        },
        {"prompt": "Two boys swim. / Boys are in water.", "reference": "entailment"},
        {"prompt": "A cat sits. / The cat is black.", "reference": "neutral"},
        {"prompt": "All are gone. / Somebody is here.", "reference": "contradiction"},
        {"prompt": "He drives a car. / He uses a vehicle.", "reference": "entailment"},
        {"prompt": "She sings. / She sings well.", "reference": "neutral"},
        {"prompt": "The cup is full. / The cup is empty.", "reference": "contradiction"},
        {"prompt": "Bees fly. / Insects fly.", "reference": "entailment"},
        {"prompt": "A bus waits. / The bus is late.", "reference": "neutral"},
        {"prompt": "A child eats. / The child is six.", "reference": "neutral"},
    ],
}
