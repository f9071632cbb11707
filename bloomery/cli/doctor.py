"""`bloomery doctor`."""

import typer

from bloomery.cli.options import DATA_DIR, AgentsOption, DataDirOption, DTypeOption, EndpointsOption, GradersOption, ModelOption, ThreadsOption


def doctor(
    data_dir: DataDirOption = DATA_DIR,
    model: ModelOption = None,
    dtype: DTypeOption = "float32",
    threads: ThreadsOption = None,
    endpoints: EndpointsOption = None,
    agents: AgentsOption = None,
    graders: GradersOption = "L1",
) -> None:
    """Show versions and devices, whether bit-exact mode holds here, and what is missing.

    Exits with 0 when nothing is, beside a running server too, and with 1 when something is.
    """
    from bloomery.doctor import examine

    problems = []
    for finding in examine(data_dir, model or [], dtype, threads, endpoints, agents, graders):
        typer.echo(f"{finding.topic + ':':17} {finding.text}")
        if finding.problem:
            problems.append(finding.problem)
    for problem in problems:
        typer.echo(f"missing: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo("nothing is missing")
