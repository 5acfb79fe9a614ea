"""What does a real step look like, compared with the simulation of its schedule?

Question: when do the workers run the passes of a step, and what do they do in between?
Command:  python -m exps.timeline docs/timeline     (from the root of the repository; --report page.html, --schedule NAME)
Method:   one step of four stages, recorded and drawn. The stages sleep, as in exps.bubbles, so that two cores are enough
          for four workers. With ``--slow 1.5``, stage 2 takes 1.5 times as long as the others.
Finding:  the pictures in docs/timeline_light.svg and docs/timeline_dark.svg.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from exps.bubbles import ROWS, WIDTH, Sleeper
from pippy import Pipe, PipelineDriver, cluster

SECONDS = (0.010, 0.011, 0.009)  # of a stage's forward, and of the halves of its backward
SLOW, CHUNKS = 2, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", help="the SVG files to write, without _light.svg and _dark.svg")
    parser.add_argument("--report", help="an HTML file to write, too")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--slow", type=float, default=1.0, help="by how much stage 2 is slower than the others")
    options = parser.parse_args()
    factors = [options.slow if stage == SLOW else 1.0 for stage in range(4)]
    stages = [Sleeper(*(each * factor for each in SECONDS)) for factor in factors]
    pipe = Pipe.from_sequential(nn.Sequential(*stages), nn.MSELoss())
    x = torch.zeros(CHUNKS * ROWS, WIDTH)
    with cluster(4, threads=1) as workers:
        driver = PipelineDriver(pipe, workers, schedule=options.schedule)
        driver.run(CHUNKS, x, x)
        with driver.record() as recording:
            for _ in range(5):
                driver.run(CHUNKS, x, x)
    for theme, media in {"light": "not all", "dark": "all"}.items():
        picture = recording.steps[-1].svg().replace("@media (prefers-color-scheme: dark)", f"@media {media}")
        Path(f"{options.pictures}_{theme}.svg").write_text(picture, encoding="utf-8")
    print(*recording.steps[-1].findings(), sep="\n")
    if options.report:
        recording.report(options.report, title=f"Sleeping stages, {options.schedule}")


if __name__ == "__main__":
    main()
