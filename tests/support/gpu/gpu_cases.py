"""The kinds of kernels, and the cases of each: what a schedule seldom meets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tests.support.gpu import gpu_check_cases as check
from tests.support.gpu import gpu_kernels, gpu_led, gpu_led_cases, gpu_schedules, gpu_world
from tests.support.gpu import gpu_link_cases as link
from tests.support.gpu import gpu_lookups as lookups
from tests.support.gpu import gpu_serve_cases as serve

NETWORK_CASES = (
    serve.answers_keep_their_order,
    link.a_step_that_a_host_has_written_is_sent,
    link.steps_in_flight_are_answered_each,
    serve.a_block_that_is_lost_is_not_waited_for,
)
CASES = (
    serve.more_clients_than_orders,
    serve.orders_wait_for_the_workers,
    serve.more_clients_than_lanes,
    serve.clients_of_one_lane_have_shares_of_their_own,
    serve.a_step_that_waits_has_no_part_in_the_shares_of_others,
    serve.tenants_share_by_weight,
    serve.a_class_goes_first_within_its_share,
    serve.a_step_waits_for_weights_as_long_as_its_client_says,
    link.nobody_answers,
    link.a_watchdog_ends_a_wait,
    link.a_pass_that_fails_while_a_put_looks_is_sent_whole_or_not_at_all,
    link.a_put_has_any_number_of_blocks,
    link.a_refused_step_voids_its_pass,
    link.steps_in_flight_are_answered_each,
    serve.a_step_is_ordered_in_eight_trips,
    serve.a_lost_block_ends_the_kernel,
    serve.a_host_stops_everything,
    serve.a_host_finds_what_its_kernel_has_left,
    serve.weights_that_come_late_block_nobody_else,
    check.a_step_names_what_its_client_holds_alone,
    serve.weights_are_seen_with_the_word_that_says_so,
    check.every_check_has_its_refusal,
    lookups.many_segments_are_looked_up_together,
    check.rows_of_the_other_wire_are_refused,
)
CASES_IN_CODES = (
    check.a_scale_is_a_number,
    check.rows_of_the_other_wire_are_refused,
    check.scales_are_those_that_were_checked,
    check.every_check_has_its_refusal,
)


class Kind(NamedTuple):
    """Kernels that are compiled alike, and what plays them."""

    load: Callable  # takes other texts for some files
    cases: Sequence[Callable]
    play: Callable | None = gpu_schedules.play  # a schedule


KINDS = {
    "mapped": Kind(gpu_world.load, CASES),
    "nvshmem": Kind(partial(gpu_world.load, nvshmem=True), NETWORK_CASES),
    "e4m3": Kind(partial(gpu_world.load, in_codes=True), CASES_IN_CODES),
    "led": Kind(gpu_world.load, gpu_led_cases.CASES, gpu_led.play),  # of mapped memory
}
KINDS |= {source: Kind(partial(gpu_kernels.load, source), cases, None) for source, cases in gpu_kernels.CASES.items()}
