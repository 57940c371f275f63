"""The command `tritium`: every command of its table exists and explains itself."""

import subprocess
import sys

import pytest

from tritium.__main__ import COMMANDS, Group, main

LINES = [
    line
    for name, command in COMMANDS.items()
    for line in (
        [[name, inner] for inner in command.commands] if isinstance(command, Group) else [[name]]
    )
]


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_each_command_has_help_under_its_own_name(line, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*line, "--help"])
    assert exit_info.value.code == 0
    assert " ".join(["usage: tritium", *line]) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("line", [[], ["--help"], ["loadtest"], ["benchmark", "-h"]])
def test_groups_list_their_commands(line, capsys):
    assert main(line) == 0
    out = capsys.readouterr().out
    group = COMMANDS[line[0]] if line and line[0] in COMMANDS else None
    for name in group.commands if isinstance(group, Group) else COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["lodtest"], "tritium: unknown command 'lodtest' (did you mean 'loadtest'?). See"),
        (
            ["loadtest", "repla"],
            "tritium loadtest: unknown command 'repla' (did you mean 'replay'?)",
        ),
        (["xyzzy"], "tritium: unknown command 'xyzzy'. See tritium --help"),
    ],
)
def test_unknown_command_names_the_nearest(line, message, capsys):
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tritium ")


def test_client_commands_do_not_import_torch():
    program = (
        "import sys\n"
        "from tritium.__main__ import main\n"
        "try:\n    main(['chat', '--help'])\n"
        "except SystemExit:\n    sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
