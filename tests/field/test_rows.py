"""Each reported case has its tests: this list names them, and what proves the rest of it in real runs elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

ROWS = {
    # The curve
    "torchforge 664": ["test_curve::torchforge_664", "tokens/test_summary::the_founding_report"],
    "unsloth 2291": ["test_curve::unsloth_2291"],
    "trl 3452": ["test_curve::trl_3452"],
    "hongbomiao.com 37684": ["test_curve::hongbomiao_37684"],
    "ms-swift 4800": ["test_curve::ms_swift_4800"],
    "open-r1-multimodal 16; OpenRLHF 931, 525": ["test_curve::open_r1_multimodal_16_openrlhf_931_525"],
    "MarinFold 237": [
        "test_curve::marinfold_237",
        "test_curve::marinfold_237_b",
        "test_curve::marinfold_237_is_in_the_docs",
    ],
    "MarinFold 208, levels": ["test_curve::marinfold_208_levels", "test_curve::marinfold_208_diverged"],
    "ms-swift 6550; Search-R1 88; ConvSearch-R1 6; theLMbook 6": [
        "test_curve::ms_swift_6550_search_r1_88_convsearch_r1_6_thelmbook_6",
        "trl/test_halt::a_real_blow_up_is_halted",
    ],
    "trl 1098": ["test_curve::trl_1098", "core/test_replay::what_a_replay_answers"],
    # NaN, missing, zero, negative, clamped
    "Agent-R1 30; verl 751, 747, 2626, 1581": [
        "test_missing_and_nonfinite::agent_r1_30_verl_751_747_2626_1581",
        "test_missing_and_nonfinite::agent_r1_30_by_verls_names",
        "trl/test_halt::nonfinite_steps_are_halted",
        "trl/test_halt::save_and_evaluation_due_are_called_off",
    ],
    "verl 747": ["test_missing_and_nonfinite::verl_747", "trl/test_rollback::a_nan_that_comes_back_halts"],
    "ms-swift 4465; unsloth-zoo 1262; trl 3248": [
        "test_missing_and_nonfinite::ms_swift_4465_unsloth_zoo_1262_trl_3248"
    ],
    "trl 6702, 6771": ["test_missing_and_nonfinite::trl_6702_6771"],
    "trl 6693": ["test_missing_and_nonfinite::trl_6693"],
    "R1-V 69": ["test_missing_and_nonfinite::r1_v_69"],
    "trl 3015, 5984, 6549, 6637; OpenRLHF 1335": [
        "test_missing_and_nonfinite::trl_3015_5984_6549_6637_openrlhf_1335",
        "test_missing_and_nonfinite::trl_3015_clipped_after_exp",
        "tokens/test_summary::log_ratios_beyond_float32_are_kept",
    ],
    "trl 4040; open-r1 704": [
        "test_missing_and_nonfinite::trl_4040_open_r1_704",
        "trl/test_tokens::the_probe_measures_kl_where_there_is_none",
    ],
    "ms-swift 5571, 5890, 7229; lmm-r1 8": ["test_missing_and_nonfinite::ms_swift_5571_5890_7229_lmm_r1_8"],
    "MarinFold 237, control": ["test_missing_and_nonfinite::marinfold_237_control"],
    "trl 1005, 925, 1161; LLaMA-Factory 664": ["test_missing_and_nonfinite::trl_1005_925_1161_llamafactory_664"],
    "verl 1779; ms-swift 8464": ["test_missing_and_nonfinite::verl_1779_ms_swift_8464"],
    "HALOs 24": ["test_missing_and_nonfinite::halos_24"],
    # The reference and the measurement
    "trl 3500; reef 536": [
        "test_reference::trl_3500_reef_536",
        "test_reference::reef_536_in_a_loop_of_ones_own",
        "trl/test_causes::the_first_cause_is_the_right_one",
    ],
    "trl 3194, 1340, 495, 4723; ms-swift 6910": [
        "test_reference::trl_3194_1340_495_4723_ms_swift_6910",
        "trl/test_causes::the_first_cause_is_the_right_one",
    ],
    "MarinFold 208, sharded": ["test_reference::marinfold_208_sharded"],
    "RLinf 470; tinker 22": ["test_reference::rlinf_470_tinker_22"],
    "NeMo-RL 2955, 3048, 3722": [
        "test_reference::nemo_rl_2955_3048_3722",
        "test_reference::nemo_rl_2955_our_own_rollback",
        "trl/test_rollback::steps_after_the_target_are_those_of_a_resume",
    ],
    "slime 2224, 1695": ["test_reference::slime_2224_1695"],
    "eval-protocol 457": [
        "test_reference::eval_protocol_457",
        "test_reference::eval_protocol_457_from_some_step_on",
    ],
    "trl 2933, 6667": ["test_reference::trl_2933_6667", "tokens/test_summary::kl_without_special_tokens"],
    "slime 1370; trl 5144, 4974": [
        "test_reference::slime_1370_trl_5144_4974",
        "trl/test_tokens::tool_tokens_do_not_count",
    ],
    # Stopping, saving, resuming
    "transformers 24614, 15089, 11748; LightRFT 53": [
        "test_stopping_and_resuming::transformers_24614_15089_11748_lightrft_53",
        "test_stopping_and_resuming::transformers_24614_at_the_start",
        "trl/test_halt::the_way_back_survives_rotation",
        "trl/test_halt::the_best_checkpoint_is_not_lost",
    ],
    "Lightning 379, 2467; sleap-nn 471; skorch 952": [
        "test_stopping_and_resuming::lightning_379_2467_sleap_nn_471_skorch_952",
        "trl/test_ranks::one_rank_sees_the_trouble",
        "lightning/test_ranks::what_one_rank_sees_halts_all",
        "loop/test_exact::two_ranks",
    ],
    "trl 1160": ["test_stopping_and_resuming::trl_1160", "trl/test_ranks::one_rank_sees_the_trouble"],
    "Lightning 13789, 13890": [
        "test_stopping_and_resuming::lightning_13789_13890",
        "lightning/test_halt::least_steps_do_not_keep_it_going",
    ],
    "Lightning 1008, 11930": [
        "test_stopping_and_resuming::lightning_1008_11930",
        "lightning/test_halt::the_halting_step_is_saved_by_nobody",
    ],
    "trl 7047, 7053, 4086; ms-swift 9261": [
        "test_stopping_and_resuming::trl_7047_7053_4086_ms_swift_9261",
        "test_stopping_and_resuming::lightning_accumulates",
        "trl/test_tokens::every_step_is_observed_whatever_is_logged",
    ],
    "unsloth-zoo 873": [
        "test_stopping_and_resuming::unsloth_zoo_873",
        "trl/test_halt::the_guard_changes_nothing",
        "trl/test_tokens::training_is_the_same_with_tokens",
    ],
    "trl 3247, 2657, 3185; open-r1 450": [
        "test_stopping_and_resuming::trl_3247_2657_3185_open_r1_450",
        "trl/test_exact::a_rollback_is_a_resume_in_a_fresh_process",
        "trl/test_facts::rollouts_of_the_abandoned_policy_are_dropped",
        "lightning/test_rollback::it_is_a_resume_from_the_same_checkpoint",
    ],
    "rsl_rl 221; molt 130; lerobot 4560; accelerate 1479": [
        "test_stopping_and_resuming::rsl_rl_221_molt_130_lerobot_4560_accelerate_1479",
        "test_stopping_and_resuming::lerobot_4560_first_kl",
        "trl/test_restore::a_failed_check_halts_and_names_itself",
    ],
    "Soup 342": [
        "test_stopping_and_resuming::soup_342",
        "trl/test_halt::a_healthy_run_passes_in_silence",
        "lightning/test_watching::training_is_not_changed",
    ],
    "OpenRLHF 1289; ray 18492": [
        "test_stopping_and_resuming::openrlhf_1289_ray_18492",
        "test_stopping_and_resuming::openrlhf_1289_is_restored",
    ],
    "trl 232, 238; NeMo-RL 3404; rl_games 348": ["test_stopping_and_resuming::trl_232_238_nemo_rl_3404_rl_games_348"],
}
"""By source, as file and test without `test_`; files of this folder have no folder before them."""


def there_are(path: Path) -> set[str]:
    """The tests of a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("source", ROWS)
def test_every_case_has_its_tests(source):
    """Those listed exist, and one of them is in this folder."""
    for place in ROWS[source]:
        file, name = place.split("::")
        assert f"test_{name}" in there_are((TESTS if "/" in file else TESTS / "field") / f"{file}.py"), place
    assert any("/" not in place for place in ROWS[source])


def test_every_test_has_its_case():
    """None here is left out of the list."""
    listed = {place for places in ROWS.values() for place in places if "/" not in place}
    files = [path for path in (TESTS / "field").glob("test_*.py") if path != Path(__file__)]
    assert {f"{path.stem}::{name.removeprefix('test_')}" for path in files for name in there_are(path)} == listed
