"""What whole models are asked to continue when their fidelity is measured: prose, a dialogue, Python, numbers. It never changes, so that cards of
different versions compare."""

from typing import Final

TEXT: Final = '''\
The harbour at Linwick is older than the town. Before there was a street or a church, fishermen pulled their boats up the shingle under the east
cliff, because the current there turns back on itself and leaves a strip of quiet water behind the rocks. The first wall was built in a dry summer,
when the river ran so low that masons could stand in its bed, and it lasted for ninety years. The second was finished by their grandchildren, who made
it twice as thick and forgot to leave a gate for the flood. It lasted for six. What stands today is the fourth, and nobody in Linwick calls it new,
although the stones at the northern end still show the marks of the saw.

Every boat that enters is written down. The keeper notes its name, the hour, the height of the water at the iron gauge, and whatever the crew is
willing to say about their catch, which is seldom true. Most of these books have survived. A geographer who copied them found that the highest tides
of the last century arrived about four minutes later each decade, and she spent the rest of her life explaining why. Her answer was not the moon, nor
the weather, but mud: the bay had become shallower by the height of a man, and a wave that has less water under it travels more slowly.

"And what do you do with such a number?" asked the mayor, when she showed him the curve.
"You dig," she said, "or you wait, and write a larger number into the next book."
"How much would it cost to dig?"
"Less than the fifth wall. Ask me again in ten years, and the answer will be no."

Her method needs no more than a few lines. It reads the hours, takes away the part that repeats with the moon, and fits a straight line through what
is left:

def drift(records, period_hours=12.4206):
    """Minutes by which high water comes later in each year."""
    years, delays = [], []
    for year, hours in sorted(records.items()):
        phases = [hour % period_hours for hour in hours if hour is not None]
        if len(phases) < 300:
            continue  # A year with too many gaps says nothing.
        years.append(year)
        delays.append(60 * sum(phases) / len(phases))
    mean_year, mean_delay = sum(years) / len(years), sum(delays) / len(delays)
    above = sum((year - mean_year) * (delay - mean_delay) for year, delay in zip(years, delays))
    return above / sum((year - mean_year) ** 2 for year in years)

| year | records | mean delay (min) | depth (m) |
|------|---------|------------------|-----------|
| 1911 | 688     | 0.0              | 7.42      |
| 1931 | 701     | 8.3              | 7.05      |
| 1951 | 694     | 15.9             | 6.71      |
| 1971 | 655     | 24.6             | 6.30      |
| 1991 | 703     | 31.8             | 5.96      |

The town did not dig. It bought a pump, {"model": "K-40", "litres_per_second": 85, "noise": "considerable"}, and named it after the mayor. On winter
nights, when the wind comes from the south-west and the gauge shows more than five metres, you can hear it from the far side of the river, and people
who cannot sleep count its strokes. There are forty in a minute. At the spring tide of the following March there were forty-one.
'''
