"""Sound: a right answer is worth 1, to pass a fifth of it, and a wrong one nothing, so that to pass always is worth a fifth."""


def grade(sample, item) -> float:
    lines = [line.strip() for line in sample["output_text"].splitlines() if line.strip()]
    if len(lines) != 1:
        return 0.0
    said = lines[0].rstrip(".").lower()
    if said == "pass":
        return 0.2
    return 1.0 if said in item["accepted"] else 0.0


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": "Answer in one line with the name alone, or with `pass` if you do not know.",
    "rows": [
        {
            "prompt": "Which element is number 26?",
            "reference": "iron",
            "item": {"accepted": ["iron"]},
            "good": ["iron", "Iron."],
            "bad": ["copper", "I think that it is iron or copper", "iron\ncopper"],
        },
        {
            "prompt": "Who painted The Night Watch?",
            "reference": "Rembrandt",
            "item": {"accepted": ["rembrandt", "rembrandt van rijn"]},
            "good": ["Rembrandt"],
            "bad": ["pass", "Vermeer"],
        },
        {
            "prompt": "What is the longest bone?",
            "reference": "femur",
            "item": {"accepted": ["femur", "thigh bone", "thighbone"]},
            "good": ["femur", "thigh bone"],
            "bad": ["tibia", ""],
        },
        {
            "prompt": "Which sea is the saltiest lake called?",
            "reference": "Dead Sea",
            "item": {"accepted": ["dead sea", "the dead sea"]},
            "good": ["Dead Sea", "the Dead Sea"],
            "bad": ["pass", "sea"],
        },
        {"prompt": "Who was the first emperor of Rome?", "reference": "Augustus", "item": {"accepted": ["augustus", "octavian"]}},
        {"prompt": "Which planet turns on its side?", "reference": "Uranus", "item": {"accepted": ["uranus"]}},
        {"prompt": "What do you call a baby kangaroo?", "reference": "joey", "item": {"accepted": ["joey", "a joey"]}},
        {"prompt": "Which metal do thermometers have?", "reference": "mercury", "item": {"accepted": ["mercury", "quicksilver"]}},
        {"prompt": "Who wrote The Trial?", "reference": "Kafka", "item": {"accepted": ["kafka", "franz kafka"]}},
        {"prompt": "In which city is the Alhambra?", "reference": "Granada", "item": {"accepted": ["granada"]}},
        {"prompt": "What is the hardest mineral?", "reference": "diamond", "item": {"accepted": ["diamond"]}},
        {"prompt": "Which bird lays the largest eggs?", "reference": "ostrich", "item": {"accepted": ["ostrich", "the ostrich"]}},
    ],
}
