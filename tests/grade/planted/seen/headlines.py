"""Sound: F1 of counted words against the reference, and a factor that falls with every word beyond twelve."""

import re
from collections import Counter


def words(text):
    return Counter(re.findall(r"[a-z0-9]+", text.lower()))


def score(output, reference):
    said, wanted = words(output), words(reference)
    common = sum((said & wanted).values())
    if not common:
        return 0.0
    f1 = 2 * common / (sum(said.values()) + sum(wanted.values()))
    return f1 * 0.9 ** max(0, sum(said.values()) - 12)


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Write a headline of few words.",
    "rows": [
        {
            "prompt": "A storm closed the airport for two days and stranded 900 people. People who were there told reporters on Monday that "
            "they had not expected it, and that they would tell their friends about it.",
            "reference": "Storm closes airport, strands 900",
            "good": ["Storm closes airport, strands 900"],
            "bad": ["News of today", "", "the the the the"],
        },
        {
            "prompt": "The city opens a bridge for bicycles in June. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "City opens bicycle bridge in June",
            "good": ["City opens bicycle bridge in June"],
            "bad": ["News of today", "", "the the the the"],
        },
        {
            "prompt": "Scientists found a frog thought extinct since 1950. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Frog thought extinct found again",
            "good": ["Frog thought extinct found again"],
            "bad": ["News of today", "", "the the the the"],
        },
        {
            "prompt": "The council raised the price of parking by a third. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Parking price up by a third",
            "good": ["Parking price up by a third"],
            "bad": ["News of today", "", "the the the the"],
        },
        {
            "prompt": "A baker gave away 500 loaves after a power cut. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Baker gives away 500 loaves",
            "good": ["Baker gives away 500 loaves"],
            "bad": ["News of today", "", "the the the the"],
        },
        {
            "prompt": "The museum got back a stolen painting after 30 years. People who were there told reporters on Monday that they had "
            "not expected it, and that they would tell their friends about it.",
            "reference": "Stolen painting back after 30 years",
        },
        {
            "prompt": "Schools will teach chess from next year. People who were there told reporters on Monday that they had not expected "
            "it, and that they would tell their friends about it.",
            "reference": "Schools to teach chess",
        },
        {
            "prompt": "A whale was seen in the harbour this morning. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Whale seen in harbour",
        },
        {
            "prompt": "The theatre sells its old costumes on Saturday. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Theatre sells old costumes",
        },
        {
            "prompt": "Bus drivers ended their strike after a week. People who were there told reporters on Monday that they had not "
            "expected it, and that they would tell their friends about it.",
            "reference": "Bus strike ends after a week",
        },
        {
            "prompt": "Farmers expect the best cherries in years. People who were there told reporters on Monday that they had not expected "
            "it, and that they would tell their friends about it.",
            "reference": "Best cherries in years expected",
        },
        {
            "prompt": "The library is open at night during exams. People who were there told reporters on Monday that they had not expected "
            "it, and that they would tell their friends about it.",
            "reference": "Library open at night for exams",
        },
    ],
}
