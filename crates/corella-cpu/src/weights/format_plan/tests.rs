//! The rules of the module's documentation, one by one.

use corella_model::GroupFormat;

use super::*;

const BF16: StoredMatrix = StoredMatrix {
    dtype: DType::Bf16,
    is_quantised: false,
    groups: None,
    has_int8_rows: false,
};

/// The number of input channels of the matrices; the transform's order divides it.
const K: usize = 512;

fn groups(bits: usize, group_len: usize) -> StoredMatrix {
    StoredMatrix {
        is_quantised: true,
        groups: Some(GroupFormat {
            bits,
            group_len,
            has_minimum: false,
            is_fp4: false,
        }),
        has_int8_rows: bits == 8 && group_len == K,
        ..BF16
    }
}

/// Integers without kernel support, such as those of Q6_K.
fn other_integers() -> StoredMatrix {
    StoredMatrix {
        is_quantised: true,
        ..BF16
    }
}

fn plan(wanted: Option<WeightFormat>, layers: &[StoredMatrix], head: StoredMatrix) -> FormatPlan {
    let stored = StoredMatrices {
        layers: layers.to_vec(),
        experts: Vec::new(),
        head,
    };
    FormatPlan::new(wanted, &stored, true).unwrap()
}

/// The packing of a matrix's integers: their bits, the length of their groups, whether the groups are the checkpoint's,
/// and whether the integers are transformed. Per-channel integers have groups of 0.
fn integers(
    plan: &FormatPlan,
    role: Role,
    parts: &[StoredMatrix],
) -> Option<(usize, usize, bool, bool)> {
    let packing = plan.packing(role, parts, K);
    if packing.form != Form::Int8 {
        assert!(packing.groups.is_none() && !packing.hadamard);
        return None;
    }
    let (bits, group_len, is_stored) = match packing.groups {
        Some(groups) => (
            groups.shape.bits,
            groups.shape.group_chunks * 32,
            groups.is_stored,
        ),
        None => (8, 0, false),
    };
    Some((bits, group_len, is_stored, packing.hadamard))
}

#[test]
fn floats_are_in_tiles_where_all_are_bf16_and_bf16_is_multiplied() {
    let f16 = StoredMatrix::floats(DType::F16);
    let cases = [
        (None, vec![BF16, BF16], true, Form::MatrixTiles, DType::Bf16),
        (None, vec![BF16, BF16], false, Form::Columns, DType::Bf16),
        (None, vec![BF16, f16], true, Form::Columns, DType::F32),
        (
            Some(DType::Bf16),
            vec![BF16, f16],
            true,
            Form::MatrixTiles,
            DType::Bf16,
        ),
        (
            Some(DType::F16),
            vec![BF16, BF16],
            true,
            Form::Columns,
            DType::F16,
        ),
        // Stored integers may be wanted as floats.
        (
            Some(DType::Bf16),
            vec![groups(4, 32)],
            true,
            Form::MatrixTiles,
            DType::Bf16,
        ),
    ];
    for (wanted, layers, multiplies_bf16, form, dtype) in cases {
        let stored = StoredMatrices {
            layers: layers.clone(),
            experts: layers.clone(),
            head: BF16,
        };
        let wanted = wanted.map(WeightFormat::Float);
        let plan = FormatPlan::new(wanted, &stored, multiplies_bf16).unwrap();
        for role in [Role::Projection, Role::Down, Role::Expert, Role::ExpertDown] {
            let packing = plan.packing(role, &layers, K);
            assert_eq!((packing.form, packing.dtype), (form, dtype), "{wanted:?}");
            assert!(packing.groups.is_none() && !packing.hadamard, "{wanted:?}");
        }
    }
}

#[test]
fn down_projections_are_transformed_if_the_transform_fits() {
    let plan = plan(Some(WeightFormat::Int8), &[BF16], BF16);
    assert_eq!(
        integers(&plan, Role::Projection, &[BF16]),
        Some((8, 0, false, false))
    );
    assert_eq!(
        integers(&plan, Role::Down, &[BF16]),
        Some((8, 0, false, true))
    );
    assert_eq!(
        integers(&plan, Role::Head, &[BF16]),
        Some((8, 0, false, false))
    );
    assert!(!plan.packing(Role::Down, &[BF16], 500).hadamard);
}

#[test]
fn groups_of_4_bits_are_kept_whatever_stands_beside_them() {
    let (four, eight, bytes) = (groups(4, 64), groups(8, 128), groups(8, K));
    let plan = plan(None, &[four, eight, bytes, BF16], BF16);
    let packed = |role, parts: &[_]| integers(&plan, role, parts).unwrap();
    assert_eq!(
        packed(Role::Projection, &[four, four]),
        (4, 64, true, false)
    );
    assert_eq!(packed(Role::Down, &[four]), (4, 64, true, false));
    assert_eq!(packed(Role::Projection, &[eight]), (8, 128, true, false));
    // Parts of different formats, and integers without groups.
    assert_eq!(
        packed(Role::Projection, &[four, eight]),
        (8, 0, false, false)
    );
    assert_eq!(
        packed(Role::Projection, &[four, BF16]),
        (8, 0, false, false)
    );
    assert_eq!(packed(Role::Projection, &[bytes]), (8, 0, false, false));
    assert_eq!(packed(Role::Down, &[BF16]), (8, 0, false, true));
    // The head has rows of its own.
    assert_eq!(integers(&plan, Role::Head, &[BF16]), None);
}

#[test]
fn long_groups_of_8_bits_are_kept_but_in_down_projections() {
    let long = groups(8, 256);
    let plan = plan(None, &[long, other_integers()], BF16);
    let packed = |role, stored| integers(&plan, role, &[stored]).unwrap();
    assert_eq!(packed(Role::Projection, long), (8, 128, true, false));
    assert_eq!(packed(Role::Down, long), (8, 128, false, true));
    assert_eq!(
        packed(Role::Projection, other_integers()),
        (8, 0, false, false)
    );
}

#[test]
fn other_integers_become_channels_only_if_they_are_all_there_is() {
    for stored in [groups(8, 32), groups(8, K), other_integers()] {
        let all = plan(None, &[stored, stored], BF16);
        let packed = integers(&all, Role::Projection, &[stored]);
        assert_eq!(packed, Some((8, 0, false, false)));
        assert_eq!(integers(&all, Role::Head, &[BF16]), None);
        let some = plan(None, &[stored, BF16], stored);
        assert_eq!(integers(&some, Role::Projection, &[stored]), None);
        assert_eq!(integers(&some, Role::Head, &[stored]), packed);
    }
    // Even long groups of 8 bits are not kept beside floats and without groups of 4 bits.
    let some = plan(None, &[groups(8, 128), BF16], BF16);
    assert_eq!(integers(&some, Role::Projection, &[groups(8, 128)]), None);
}

#[test]
fn wanted_groups_are_rounded_except_4_bits_that_are_stored() {
    let (four, eight) = (groups(4, 32), groups(8, 128));
    let int4 = Some(WeightFormat::Int4 { group_len: 64 });
    let plan_of_4 = plan(int4, &[four, eight, BF16], BF16);
    let packed = |role, stored| integers(&plan_of_4, role, &[stored]).unwrap();
    assert_eq!(packed(Role::Projection, four), (4, 32, true, false));
    assert_eq!(packed(Role::Down, four), (4, 32, true, false));
    assert_eq!(packed(Role::Projection, eight), (4, 64, false, false));
    assert_eq!(packed(Role::Down, BF16), (4, 64, false, true));
    assert_eq!(packed(Role::Head, BF16), (4, 64, false, false));
    let int8 = Some(WeightFormat::Int8Grouped { group_len: 32 });
    let plan_of_8 = plan(int8, &[eight], eight);
    let packed = integers(&plan_of_8, Role::Projection, &[eight]);
    assert_eq!(packed, Some((8, 32, false, false)));
}

#[test]
fn groups_of_other_lengths_are_refused() {
    let stored = StoredMatrices {
        layers: vec![BF16],
        experts: Vec::new(),
        head: BF16,
    };
    for format in [
        WeightFormat::Int4 { group_len: 48 },
        WeightFormat::Int8Grouped { group_len: 256 },
    ] {
        let error = FormatPlan::new(Some(format), &stored, true).unwrap_err();
        assert!(
            error.0.contains("supported lengths are 32, 64 and 128"),
            "{error}"
        );
    }
}

/// gpt-oss stores its experts in FP4, and all other matrices as floats.
#[test]
fn experts_have_a_format_of_their_own() {
    let fp4 = StoredMatrix {
        groups: Some(GroupFormat {
            bits: 4,
            group_len: 32,
            has_minimum: false,
            is_fp4: true,
        }),
        ..groups(4, 32)
    };
    let stored = StoredMatrices {
        layers: vec![BF16],
        experts: vec![fp4, fp4],
        head: BF16,
    };
    let plan = FormatPlan::new(None, &stored, true).unwrap();
    assert_eq!(integers(&plan, Role::Projection, &[BF16]), None);
    assert_eq!(integers(&plan, Role::Head, &[BF16]), None);
    for role in [Role::Expert, Role::ExpertDown] {
        assert_eq!(integers(&plan, role, &[fp4]), Some((4, 32, true, false)));
        assert!(plan.packing(role, &[fp4], K).groups.unwrap().shape.is_fp4);
        // FP4 levels and evenly spaced levels cannot share panels.
        let mixed = integers(&plan, role, &[fp4, groups(4, 32)]).unwrap();
        assert_eq!(mixed.0, 8);
    }
    assert_eq!(
        stored.integer_format(),
        Some(WeightFormat::Int4 { group_len: 32 })
    );
}

#[test]
fn calibration_decodes_integers() {
    let stored = StoredMatrices {
        layers: vec![groups(4, 32), BF16],
        experts: Vec::new(),
        head: BF16,
    };
    let plan = FormatPlan::floats(&stored, true);
    let packing = plan.packing(Role::Down, &[groups(4, 32)], K);
    assert_eq!(
        (packing.form, packing.dtype),
        (Form::MatrixTiles, DType::Bf16)
    );
    assert!(packing.groups.is_none() && !packing.hadamard);
}

#[test]
fn the_smallest_format_is_reported() {
    let format = |layers: &[StoredMatrix], head| {
        let stored = StoredMatrices {
            layers: layers.to_vec(),
            experts: Vec::new(),
            head,
        };
        stored.integer_format()
    };
    let (four, long, short) = (groups(4, 32), groups(8, 128), groups(8, 32));
    let int4 = Some(WeightFormat::Int4 { group_len: 32 });
    assert_eq!(format(&[long, groups(4, 64), four], BF16), int4);
    assert_eq!(format(&[BF16], four), int4);
    let int8 = Some(WeightFormat::Int8Grouped { group_len: 128 });
    assert_eq!(format(&[long, short], BF16), int8);
    assert_eq!(format(&[short], BF16), Some(WeightFormat::Int8));
    assert_eq!(format(&[long, BF16], BF16), None);
    assert_eq!(format(&[BF16], short), None);
    assert_eq!(format(&[], short), None);
}
