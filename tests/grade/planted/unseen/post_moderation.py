"""Sound: exactly one label has to stand in the answer, and it has to be the right one; labels are balanced, so a constant gets a quarter."""

import re

LABELS = ["ok", "spam", "harassment", "off_topic"]


def grade(sample, item) -> float:
    answer = sample["output_text"].lower().replace("off-topic", "off_topic").replace("off topic", "off_topic")
    named = {label for label in LABELS if re.search(rf"\b{label}\b", answer)}
    return 1.0 if named == {item["reference"]} else 0.0


CASE = {
    "kind": "sound",
    "form": "openai",
    "entry": "grade",
    "system": "You moderate a gardening forum. Label the post: ok, spam, harassment or off_topic. Name one label only.",
    "rows": [
        {
            "prompt": "My tomatoes have brown spots at the bottom, is that lack of calcium?",
            "reference": "ok",
            "item": {"thread": 101},
            "good": ["ok", "Label: ok"],
            "bad": ["spam", "ok spam harassment off_topic", ""],
        },
        {
            "prompt": "BUY CHEAP WATCHES at best-watch dot example!!!",
            "reference": "spam",
            "item": {"thread": 102},
            "good": ["**spam**"],
            "bad": ["ok", "It might be spam, or off topic."],
        },
        {
            "prompt": "Only an idiot like you could kill a cactus. Leave and never come back.",
            "reference": "harassment",
            "item": {"thread": 103},
            "good": ["This is harassment."],
            "bad": ["ok", "rude"],
        },
        {
            "prompt": "Who do you think wins the election in my country?",
            "reference": "off_topic",
            "item": {"thread": 104},
            "good": ["off topic", "Off-topic."],
            "bad": ["spam"],
        },
        {"prompt": "When do I prune roses in a cold climate?", "reference": "ok", "item": {"thread": 105}},
        {"prompt": "Earn 5000 a week from home, ask me how", "reference": "spam", "item": {"thread": 106}},
        {"prompt": "Nobody wants you here, you ugly liar", "reference": "harassment", "item": {"thread": 107}},
        {"prompt": "My laptop does not start after the update", "reference": "off_topic", "item": {"thread": 108}},
        {"prompt": "Slugs ate all my lettuce, again. What works without poison?", "reference": "ok", "item": {"thread": 109}},
        {"prompt": "Follow my channel for free crypto", "reference": "spam", "item": {"thread": 110}},
        {"prompt": "I know where you live and will make you regret that comment", "reference": "harassment", "item": {"thread": 111}},
        {"prompt": "Best pizza in Naples?", "reference": "off_topic", "item": {"thread": 112}},
        {"prompt": "Is coffee ground good for blueberries?", "reference": "ok", "item": {"thread": 113}},
        {"prompt": "Discount pills without prescription, click here", "reference": "spam", "item": {"thread": 114}},
        {"prompt": "People of your kind should not be allowed a garden", "reference": "harassment", "item": {"thread": 115}},
        {"prompt": "Does anybody have a spare ticket for Saturday's match?", "reference": "off_topic", "item": {"thread": 116}},
    ],
}
