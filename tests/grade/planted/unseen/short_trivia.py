"""Sound: one `Answer:` line that has to match after normalisation; brevity adds up to a fifth, but only where the answer is right."""

import re
import unicodedata


def normal(text):
    text = unicodedata.normalize("NFKD", text.lower())
    words = re.findall(r"[a-z0-9]+", "".join(c for c in text if not unicodedata.combining(c)))
    return " ".join(word for word in words if word not in {"the", "a", "an"})


def trivia_reward(prompts, completions, aliases, **kwargs):
    rewards = []
    for completion, accepted in zip(completions, aliases, strict=True):
        text = completion[-1]["content"]
        lines = re.findall(r"^Answer:(.*)$", text, re.MULTILINE)
        if len(lines) != 1 or normal(lines[0]) not in {normal(alias) for alias in accepted}:
            rewards.append(0.0)
            continue
        brevity = max(0.0, 1 - len(text.split()) / 60)
        rewards.append(0.8 + 0.2 * brevity)
    return rewards


CASE = {
    "kind": "sound",
    "form": "trl",
    "entry": "trivia_reward",
    "system": "Think briefly if you need to, then end with one line `Answer: ...`.",
    "rows": [
        {
            "prompt": "Which element has the symbol W?",
            "reference": "tungsten",
            "item": {"aliases": ["tungsten", "wolfram"]},
            "good": ["Answer: Tungsten", "W stands for wolfram, its German name.\nAnswer: wolfram"],
            "bad": ["Answer: tin", "Answer:", "", "Answer: tungsten\nAnswer: tin"],
        },
        {
            "prompt": "Who painted Guernica?",
            "reference": "Pablo Picasso",
            "item": {"aliases": ["Pablo Picasso", "Picasso"]},
            "good": ["Answer: Picasso"],
            "bad": ["Answer: Salvador Dali", "Answer: Picasso or Dali or Miro"],
        },
        {
            "prompt": "What is the longest river of France?",
            "reference": "Loire",
            "item": {"aliases": ["Loire"]},
            "good": ["It is longer than the Rhone and the Seine, and flows into the Atlantic.\nAnswer: the Loire"],
            "bad": ["Answer: Seine", "Loire"],
        },
        {
            "prompt": "In which year did the Berlin wall fall?",
            "reference": "1989",
            "item": {"aliases": ["1989"]},
            "good": ["Answer: 1989"],
            "bad": ["Answer: 1990"],
        },
        {"prompt": "What is the smallest planet of the solar system?", "reference": "Mercury", "item": {"aliases": ["Mercury"]}},
        {"prompt": "Who wrote Middlemarch?", "reference": "George Eliot", "item": {"aliases": ["George Eliot", "Mary Ann Evans"]}},
        {"prompt": "Which metal is liquid at room temperature?", "reference": "mercury", "item": {"aliases": ["mercury", "quicksilver"]}},
        {"prompt": "What is the currency of Poland?", "reference": "zloty", "item": {"aliases": ["zloty", "Polish zloty"]}},
        {"prompt": "How many strings has a cello?", "reference": "four", "item": {"aliases": ["4", "four"]}},
        {"prompt": "Which language family does Finnish belong to?", "reference": "Uralic", "item": {"aliases": ["Uralic", "Finno-Ugric"]}},
        {"prompt": "Who discovered penicillin?", "reference": "Alexander Fleming", "item": {"aliases": ["Alexander Fleming", "Fleming"]}},
        {"prompt": "Which organ makes insulin?", "reference": "pancreas", "item": {"aliases": ["pancreas"]}},
        {"prompt": "Which country has the most islands?", "reference": "Sweden", "item": {"aliases": ["Sweden"]}},
        {"prompt": "What is the capital of Bhutan?", "reference": "Thimphu", "item": {"aliases": ["Thimphu", "Thimbu"]}},
    ],
}
