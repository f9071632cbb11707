"""Sound: exactly one time of the day, which has to be the right one to the minute."""

import re


def clock_reward(prompts, completions, there, **kwargs):
    rewards = []
    for completion, right in zip(completions, there, strict=True):
        said = re.findall(r"\b(\d{1,2}):(\d{2})\b", completion[-1]["content"])
        wanted = tuple(map(int, right.split(":")))
        rewards.append(1.0 if [(int(hour), int(minute)) for hour, minute in said] == [wanted] else 0.0)
    return rewards


CASE = {
    "kind": "sound",
    "form": "trl",
    "entry": "clock_reward",
    "system": "Answer with the time there as HH:MM.",
    "rows": [
        {
            "prompt": "It is 09:30 here. What time is it 5 hours ahead of us?",
            "reference": "14:30",
            "item": {"there": "14:30"},
            "good": ["14:30", "There it is 14:30."],
            "bad": ["04:30", "14:30 or 04:30", "half past two"],
        },
        {
            "prompt": "It is 23:15 here. What time is it 3 hours ahead of us?",
            "reference": "02:15",
            "item": {"there": "02:15"},
            "good": ["02:15", "2:15"],
            "bad": ["26:15", "20:15"],
        },
        {
            "prompt": "It is 01:00 here. What time is it 8 hours behind us?",
            "reference": "17:00",
            "item": {"there": "17:00"},
            "good": ["17:00"],
            "bad": ["09:00", ""],
        },
        {
            "prompt": "It is 12:10 here. What time is it 5 hours and 30 minutes ahead of us?",
            "reference": "17:40",
            "item": {"there": "17:40"},
            "good": ["17:40"],
            "bad": ["17:10", "12:10"],
        },
        {"prompt": "It is 06:45 here. What time is it 7 hours behind us?", "reference": "23:45", "item": {"there": "23:45"}},
        {"prompt": "It is 18:20 here. What time is it 9 hours ahead of us?", "reference": "03:20", "item": {"there": "03:20"}},
        {"prompt": "It is 11:05 here. What time is it 2 hours behind us?", "reference": "09:05", "item": {"there": "09:05"}},
        {"prompt": "It is 15:55 here. What time is it 4 hours ahead of us?", "reference": "19:55", "item": {"there": "19:55"}},
        {"prompt": "It is 20:00 here. What time is it 10 hours behind us?", "reference": "10:00", "item": {"there": "10:00"}},
        {"prompt": "It is 00:35 here. What time is it 6 hours ahead of us?", "reference": "06:35", "item": {"there": "06:35"}},
        {"prompt": "It is 08:12 here. What time is it 11 hours ahead of us?", "reference": "19:12", "item": {"there": "19:12"}},
        {"prompt": "It is 22:48 here. What time is it 5 hours behind us?", "reference": "17:48", "item": {"there": "17:48"}},
    ],
}
