"""Templates that never end or make endless text are stopped."""

import time

import pytest

from tritium.backend.front import bounded_jinja
from tritium.backend.front.bounded_jinja import BoundedEnvironment, Exceeded


@pytest.fixture(scope="module")
def environment():
    return BoundedEnvironment()


def render(environment, source) -> str:
    return environment.render(environment.from_string(source), {"nine": 9})


LOOP = "{%% for i in range(100000) %%}%s{%% endfor %%}"
LONG = "{%% set b = 'a' * 10**7 %%}%s"


@pytest.mark.parametrize(
    "source",
    [
        LOOP % (LOOP % (LOOP % "")),
        LOOP % (LOOP % (LOOP % "{% if i %}{% continue %}{% endif %}")),
        "{% for i in range(100000) if range(100000) | list | length == 3 %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}",
        "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}",
        LOOP % (LOOP % "{{ caller }}"),
        "{% set x = range(100000) | map('string') | list %}" + LOOP % "{{ x | sort | first }}",
    ],
)
def test_too_long(environment, monkeypatch, source):
    monkeypatch.setattr(bounded_jinja, "MAX_SECONDS", 0.1)
    begin = time.thread_time()
    with pytest.raises(Exceeded, match=r"^it takes more than 0\.1 s$"):
        render(environment, source)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize(
    "source",
    [
        LOOP % (LOOP % ("0123456789" * 1000)),
        LONG % "{{ b }}{{ b }}",
        LONG % (LOOP % "{{ b }}"),
        LONG % ("{% set c %}" + LOOP % "{{ b }}" + "{% endset %}"),
        LONG % ("{% macro m() %}" + LOOP % "{{ b }}" + "{% endmacro %}{{ m() }}"),
        LONG % "{{ b ~ b }}",
        LONG % "{{ b + b }}",
        LONG % "{{ [b] * 3 }}",
        LONG % "{{ ([b] * 3) | tojson }}",
        LONG % "{{ ([b] * 3) | string }}",
        LONG % "{{ '%s%s' % (b, b) }}",
        LONG % "{{ [b, b] | join }}",
        LONG % "{{ b | join('--') }}",
        LONG % "{{ ''.join([b, b]) }}",
        LONG % "{{ b | replace('a', 'bb') }}",
        LONG % "{{ b.replace('a', 'bb') }}",
        LONG % "{{ range(100000) | map('string') | join(b) }}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ ['a'] * 10**9 }}",
        "{{ [['a'] * 10**5] * 10**5 }}",
        "{{ ([['a'] * 10**4] * 10**4) | sum(start=[]) }}",
        "{% set n = namespace(x='ab') %}" + LOOP % "{% set n.x = n.x ~ n.x %}",
        "{% set n = namespace(x=['a']) %}" + LOOP % "{% set n.x = n.x + n.x %}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ [1, 2] | tojson(indent=10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ nine**10000000 }}",
        "{% set n = namespace(x=9) %}" + LOOP % "{% set n.x = n.x * n.x %}",
    ],
)
def test_too_large(environment, source):
    begin = time.thread_time()
    with pytest.raises(Exceeded):
        render(environment, source)
    assert time.thread_time() - begin < 1.5


def test_ranges_and_recursion_have_bounds_of_their_own(environment):
    with pytest.raises(OverflowError):
        render(environment, "{% for i in range(10**9) %}{% endfor %}")
    with pytest.raises(RecursionError):
        render(environment, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_each_rendering_has_all_of_its_bounds(environment):
    for _ in range(3):
        assert len(render(environment, LONG % "{{ b }}")) == 10**7
