"""Sound: the share of the errors that are gone, less what was changed besides: the sentence as it was is worth nothing."""


def distance(first, second):
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]


def score(output, reference, item):
    said = output.strip()[:200]
    return max(0.0, 1 - distance(said, reference) / distance(item["sentence"], reference))


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Correct the spelling. Answer with the sentence alone.",
    "rows": [
        {
            "prompt": "She recieved the letter on a rainy Thursday afternoon.",
            "reference": "She received the letter on a rainy Thursday afternoon.",
            "good": ["She received the letter on a rainy Thursday afternoon."],
            "bad": ["There is one error.", "A letter came.", "She recieved the letter on a rainy Thursday afternoon."],
            "item": {"sentence": "She recieved the letter on a rainy Thursday afternoon."},
        },
        {
            "prompt": "It is definately the best soup of the whole town.",
            "reference": "It is definitely the best soup of the whole town.",
            "good": ["It is definitely the best soup of the whole town."],
            "bad": ["definitely", "It is definately the best soup of the whole town."],
            "item": {"sentence": "It is definately the best soup of the whole town."},
        },
        {
            "prompt": "The goverment will publish the report next weak.",
            "reference": "The government will publish the report next week.",
            "good": ["The government will publish the report next week."],
            "bad": ["Government reports are published weekly.", "The goverment will publish the report next weak."],
            "item": {"sentence": "The goverment will publish the report next weak."},
        },
        {
            "prompt": "We were suprised by the amount of snow in April.",
            "reference": "We were surprised by the amount of snow in April.",
            "good": ["We were surprised by the amount of snow in April."],
            "bad": ["Snow in April surprises nobody who lives here.", "We were suprised by the amount of snow in April."],
            "item": {"sentence": "We were suprised by the amount of snow in April."},
        },
        {
            "prompt": "Their is a spare key under the blue flower pot.",
            "reference": "There is a spare key under the blue flower pot.",
            "item": {"sentence": "Their is a spare key under the blue flower pot."},
        },
        {
            "prompt": "Please seperate the paper from the other rubbish.",
            "reference": "Please separate the paper from the other rubbish.",
            "item": {"sentence": "Please seperate the paper from the other rubbish."},
        },
        {
            "prompt": "He could of told us before the train left the station.",
            "reference": "He could have told us before the train left the station.",
            "item": {"sentence": "He could of told us before the train left the station."},
        },
        {
            "prompt": "The restaurant has accomodated forty guests tonight.",
            "reference": "The restaurant has accommodated forty guests tonight.",
            "item": {"sentence": "The restaurant has accomodated forty guests tonight."},
        },
        {
            "prompt": "I would like to loose some weight until the summer.",
            "reference": "I would like to lose some weight until the summer.",
            "item": {"sentence": "I would like to loose some weight until the summer."},
        },
        {
            "prompt": "Her neice studies mathematics at the university.",
            "reference": "Her niece studies mathematics at the university.",
            "item": {"sentence": "Her neice studies mathematics at the university."},
        },
        {
            "prompt": "This medicine has no known affects on children.",
            "reference": "This medicine has no known effects on children.",
            "item": {"sentence": "This medicine has no known affects on children."},
        },
        {
            "prompt": "The meeting was postponed untill the end of the month.",
            "reference": "The meeting was postponed until the end of the month.",
            "item": {"sentence": "The meeting was postponed untill the end of the month."},
        },
    ],
}
