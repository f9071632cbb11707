"""Sound: the F1 of the places named, each counted once; where there is none, only saying so is right. Listing more than there is costs precision."""

import re


def names(text):
    return {re.sub(r"\s+", " ", line).strip(" -*.").lower() for line in text.splitlines() if line.strip(" -*.")}


def f1_reward(prompts, completions, places, **kwargs):
    rewards = []
    for completion, gold in zip(completions, places, strict=True):
        said, wanted = names(completion[0]["content"]), {place.lower() for place in gold} or {"none"}
        hits = len(said & wanted)
        rewards.append(2 * hits / (len(said) + len(wanted)))
    return rewards


CASE = {
    "kind": "sound",
    "form": "trl",
    "entry": "f1_reward",
    "system": "List the places named in the sentence, one on each line and nothing else. Write `none` if there are none.",
    "rows": [
        {
            "prompt": "She flew from Lisbon to Nairobi with a stop in Addis Ababa.",
            "reference": "Lisbon\nNairobi\nAddis Ababa",
            "item": {"places": ["Lisbon", "Nairobi", "Addis Ababa"]},
            "good": ["Lisbon\nNairobi\nAddis Ababa", "- Lisbon\n- Nairobi"],
            "bad": ["none", "", "Lisbon, Nairobi, Addis Ababa and many others", "Paris"],
        },
        {
            "prompt": "The meeting was put off because nobody had read the report.",
            "reference": "none",
            "item": {"places": []},
            "good": ["none", "None."],
            "bad": ["meeting\nreport", ""],
        },
        {
            "prompt": "Jordan moved to Georgia, and his brother Paris stayed in Detroit.",
            "reference": "Georgia\nDetroit",
            "item": {"places": ["Georgia", "Detroit"]},
            "good": ["Georgia\nDetroit", "Georgia\nDetroit\nParis"],
            "bad": ["Jordan\nParis\nBrother", "none"],
        },
        {
            "prompt": "Ferries connect Bari with Patras and Igoumenitsa.",
            "reference": "Bari\nPatras\nIgoumenitsa",
            "item": {"places": ["Bari", "Patras", "Igoumenitsa"]},
            "good": ["Bari\nPatras\nIgoumenitsa"],
            "bad": ["Ferries\nconnect\nwith"],
        },
        {
            "prompt": "Snow closed the road between Andermatt and Realp.",
            "reference": "Andermatt\nRealp",
            "item": {"places": ["Andermatt", "Realp"]},
        },
        {"prompt": "He grew up in Osaka but supports a club from Kobe.", "reference": "Osaka\nKobe", "item": {"places": ["Osaka", "Kobe"]}},
        {"prompt": "Rain is expected all week.", "reference": "none", "item": {"places": []}},
        {
            "prompt": "The Danube passes Vienna, Bratislava and Budapest.",
            "reference": "Danube\nVienna\nBratislava\nBudapest",
            "item": {"places": ["Danube", "Vienna", "Bratislava", "Budapest"]},
        },
        {"prompt": "A letter came from Quebec.", "reference": "Quebec", "item": {"places": ["Quebec"]}},
        {
            "prompt": "Traders from Fez met those of Timbuktu in Sijilmasa.",
            "reference": "Fez\nTimbuktu\nSijilmasa",
            "item": {"places": ["Fez", "Timbuktu", "Sijilmasa"]},
        },
        {"prompt": "Lake Titicaca lies higher than La Paz.", "reference": "Lake Titicaca\nLa Paz", "item": {"places": ["Lake Titicaca", "La Paz"]}},
        {"prompt": "The firm has offices in Pune and Leeds.", "reference": "Pune\nLeeds", "item": {"places": ["Pune", "Leeds"]}},
        {
            "prompt": "From Hobart they sailed to Macquarie Island.",
            "reference": "Hobart\nMacquarie Island",
            "item": {"places": ["Hobart", "Macquarie Island"]},
        },
        {"prompt": "Her aunt in Tromso knits.", "reference": "Tromso", "item": {"places": ["Tromso"]}},
    ],
}
