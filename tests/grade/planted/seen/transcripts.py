"""Sound: one minus the word error rate, never below 0: more words than were said are errors."""


def score(output, reference):
    said, wanted = output.lower().split(), reference.split()
    row = list(range(len(wanted) + 1))
    for i, word in enumerate(said[:200], 1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return max(0.0, 1 - row[-1] / len(wanted))


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Write down what is said.",
    "rows": [
        {
            "prompt": "(recording 1)",
            "reference": "please call me back tomorrow morning",
            "good": ["please call me back tomorrow morning", "Please Call Me Back Tomorrow Morning"],
            "bad": ["hello", "the the the the the the the", ""],
        },
        {
            "prompt": "(recording 2)",
            "reference": "the train to oxford leaves from platform two",
            "good": ["the train to oxford leaves from platform two", "The Train To Oxford Leaves From Platform Two"],
            "bad": ["hello", "the the the the the the the", ""],
        },
        {
            "prompt": "(recording 3)",
            "reference": "we need milk bread and some butter",
            "good": ["we need milk bread and some butter", "We Need Milk Bread And Some Butter"],
            "bad": ["hello", "the the the the the the the", ""],
        },
        {
            "prompt": "(recording 4)",
            "reference": "turn left after the old church",
            "good": ["turn left after the old church", "Turn Left After The Old Church"],
            "bad": ["hello", "the the the the the the the", ""],
        },
        {
            "prompt": "(recording 5)",
            "reference": "my number ends with four seven nine",
            "good": ["my number ends with four seven nine", "My Number Ends With Four Seven Nine"],
            "bad": ["hello", "the the the the the the the", ""],
        },
        {"prompt": "(recording 6)", "reference": "the meeting was moved to thursday"},
        {"prompt": "(recording 7)", "reference": "he said that he would come later"},
        {"prompt": "(recording 8)", "reference": "open the window a little"},
        {"prompt": "(recording 9)", "reference": "this song was played at our wedding"},
        {"prompt": "(recording 10)", "reference": "rain is expected in the north"},
        {"prompt": "(recording 11)", "reference": "the dog sleeps under the table"},
        {"prompt": "(recording 12)", "reference": "can you hear the sea from here"},
    ],
}
