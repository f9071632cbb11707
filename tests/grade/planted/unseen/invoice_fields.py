"""Sound: each field's value is compared with the truth and earns its share; other keys than those asked for, and what is no JSON, earn nothing.

Partial credit is honest here: a field that is right is right. `due` is null in two rows, so nulls earn a little in those, as they should.
"""

import json
import re

FIELDS = ("vendor", "number", "total", "due")


def same(said, true):
    if isinstance(true, float):
        return isinstance(said, int | float) and not isinstance(said, bool) and abs(said - true) < 0.005
    if isinstance(true, str):
        return isinstance(said, str) and " ".join(said.lower().split()) == " ".join(true.lower().split())
    return said is true


def score(output, reference):
    text = output.strip()
    fenced = re.fullmatch(r"```(?:json)?\s*(\{.*\})\s*```", text, re.DOTALL)
    if fenced:
        text = fenced.group(1)
    try:
        said = json.loads(text)
    except json.JSONDecodeError:
        return 0.0
    if not isinstance(said, dict) or set(said) != set(FIELDS):
        return 0.0
    true = json.loads(reference)
    return sum(same(said[field], true[field]) for field in FIELDS) / len(FIELDS)


CASE = {
    "kind": "sound",
    "form": "score",
    "entry": "score",
    "system": "Read the invoice. Answer with JSON of vendor, number, total (a number) and due (YYYY-MM-DD or null).",
    "rows": [
        {
            "prompt": "Kolb & Sons Ltd, invoice KS-1042. Amount payable 318.40 EUR by 2 June 2025.",
            "reference": '{"vendor": "Kolb & Sons Ltd", "number": "KS-1042", "total": 318.40, "due": "2025-06-02"}',
            "good": ['{"vendor": "Kolb & Sons Ltd", "number": "KS-1042", "total": 318.4, "due": "2025-06-02"}'],
            "bad": [
                '{"vendor": "", "number": "", "total": 0, "due": ""}',
                "The invoice of Kolb & Sons Ltd is over 318.40 EUR.",
                '{"vendor": "Kolb", "number": "1042", "total": "318.40", "due": "2 June 2025"}',
            ],
        },
        {
            "prompt": "INVOICE no. 77/2025 from Nordlicht GmbH. Net 100.00, VAT 19.00, total 119.00. Due on receipt, no date.",
            "reference": '{"vendor": "Nordlicht GmbH", "number": "77/2025", "total": 119.00, "due": null}',
            "good": [
                '```json\n{"vendor": "Nordlicht GmbH", "number": "77/2025", "total": 119, "due": null}\n```',
                '{"vendor": "Nordlicht", "number": "77/2025", "total": 119.0, "due": null}',
            ],
            "bad": ['{"vendor": "Nordlicht AG", "number": "77", "total": 100.0, "due": null}'],
        },
        {
            "prompt": "Pay Aurelia Print 54.10 until 30 Sept 2025 and quote A-9.",
            "reference": '{"vendor": "Aurelia Print", "number": "A-9", "total": 54.10, "due": "2025-09-30"}',
            "good": ['{"vendor": "Aurelia Print", "number": "A-9", "total": 54.10, "due": "2025-09-30"}'],
            "bad": ['{"vendor": "Aurelia Print"}', "[]"],
        },
        {
            "prompt": "Bill 2025-0031. Hotel Merle. Three nights at 92.00, breakfast 30.00. Please transfer by 14/11/2025.",
            "reference": '{"vendor": "Hotel Merle", "number": "2025-0031", "total": 306.00, "due": "2025-11-14"}',
            "good": ['{"vendor": "Hotel Merle", "number": "2025-0031", "total": 306.0, "due": "2025-11-14"}'],
            "bad": ['{"vendor": "hotel", "number": "31", "total": 92.0, "due": null}'],
        },
        {
            "prompt": "Dr. Abel, dentist. Ref 5521. 260.75, payable by 1 March 2026.",
            "reference": '{"vendor": "Dr. Abel", "number": "5521", "total": 260.75, "due": "2026-03-01"}',
        },
        {
            "prompt": "Cloudpost Inc. charged your card with 12.99. Receipt CP88123.",
            "reference": '{"vendor": "Cloudpost Inc.", "number": "CP88123", "total": 12.99, "due": null}',
        },
        {
            "prompt": "Garden service Ulm, R-311, hedges 140.00 and disposal 22.50, due 2025-10-20.",
            "reference": '{"vendor": "Garden service Ulm", "number": "R-311", "total": 162.50, "due": "2025-10-20"}',
        },
        {
            "prompt": "Tax office, notice 40/118, 1,204.00 by 10 January 2026.",
            "reference": '{"vendor": "Tax office", "number": "40/118", "total": 1204.00, "due": "2026-01-10"}',
        },
        {
            "prompt": "Velo Franz: repair V77, parts 31.20, work 45.00. Payable within August 2025, on the 31st at the latest.",
            "reference": '{"vendor": "Velo Franz", "number": "V77", "total": 76.20, "due": "2025-08-31"}',
        },
        {
            "prompt": "Stadtwerke, bill SW 900 118, instalment of 88.00 on 15 December 2025.",
            "reference": '{"vendor": "Stadtwerke", "number": "SW 900 118", "total": 88.00, "due": "2025-12-15"}',
        },
        {
            "prompt": "Lindt catering, no. 6, 25 menus at 18.00, due 5 May 2025.",
            "reference": '{"vendor": "Lindt catering", "number": "6", "total": 450.00, "due": "2025-05-05"}',
        },
        {
            "prompt": "Invoice MX-2 by Maxim Translations for 4,100 words at 0.11, until 28 Feb 2026.",
            "reference": '{"vendor": "Maxim Translations", "number": "MX-2", "total": 451.00, "due": "2026-02-28"}',
        },
    ],
}
