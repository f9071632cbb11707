"""Sound: an F-score over clipped n-grams of characters against the reference, so neither repetition nor padding nor a copy of the source pays."""

from collections import Counter


def ngrams(text, size):
    padded = " " + " ".join(text.lower().split()) + " "
    return Counter(padded[i : i + size] for i in range(len(padded) - size + 1))


def score(output, reference):
    if not output.strip():
        return 0.0
    total = 0.0
    for size in (2, 3, 4):
        said, wanted = ngrams(output, size), ngrams(reference, size)
        hits = (said & wanted).total()
        precision, recall = hits / max(said.total(), 1), hits / max(wanted.total(), 1)
        total += 2 * precision * recall / (precision + recall) if hits else 0.0
    return total / 3


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Translate into English.",
    "rows": [
        {
            "prompt": "Der Hund schläft unter dem Tisch.",
            "reference": "The dog is sleeping under the table.",
            "good": ["The dog sleeps under the table.", "The dog is sleeping beneath the table."],
            "bad": ["Der Hund schläft unter dem Tisch.", "the the the the the the the", "A cat sits on my chair."],
        },
        {
            "prompt": "Wir haben den letzten Zug verpasst.",
            "reference": "We missed the last train.",
            "good": ["We have missed the last train."],
            "bad": ["We like trains very much, and the weather is fine.", "the last the last the last the last the last"],
        },
        {
            "prompt": "Kannst du mir bitte das Salz geben?",
            "reference": "Can you pass me the salt, please?",
            "good": ["Can you please pass me the salt?"],
            "bad": ["Do you like sugar?", "I cannot translate this."],
        },
        {
            "prompt": "Morgen soll es den ganzen Tag regnen.",
            "reference": "It is supposed to rain all day tomorrow.",
            "good": ["Tomorrow it is supposed to rain all day."],
            "bad": ["Yesterday was sunny."],
        },
        {"prompt": "Ihr Bruder arbeitet in einer kleinen Bäckerei.", "reference": "Her brother works in a small bakery."},
        {"prompt": "Ich habe meinen Schlüssel im Büro vergessen.", "reference": "I forgot my key at the office."},
        {"prompt": "Das Museum ist montags geschlossen.", "reference": "The museum is closed on Mondays."},
        {"prompt": "Warum hast du nicht angerufen?", "reference": "Why did you not call?"},
        {"prompt": "Sie spielt seit zehn Jahren Geige.", "reference": "She has been playing the violin for ten years."},
        {"prompt": "Der Weg zum See ist steil und schmal.", "reference": "The path to the lake is steep and narrow."},
        {"prompt": "Niemand wusste, wo das Geld geblieben war.", "reference": "Nobody knew where the money had gone."},
        {"prompt": "Ohne Brille kann er kaum lesen.", "reference": "Without glasses he can hardly read."},
        {"prompt": "Die Kinder bauen eine Burg aus Sand.", "reference": "The children are building a sand castle."},
    ],
}
