//! Software emulation of AMX tiles, so that AMX kernels can be tested (not timed) on machines that
//! have AVX-512 but no tiles.
//!
//! A processor without tiles raises an illegal-instruction signal for their instructions. The signal handler replaces
//! the instruction by a jump (see `detour.rs`). The jump leads to code that does what Intel's manual says of the
//! instruction (Software Developer's Manual, volume 2), rounding and subnormal numbers included, and then returns to
//! the next instruction. Forbidden instructions end the process, as they would on hardware.

mod detour;

use std::arch::x86_64::*;
use std::cell::UnsafeCell;

const NUM_TILES: usize = 8;
const MAX_ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Whether the environment variable asks for the emulation. All tests are built with the emulation. Without the
/// variable, they use the best instruction set that the processor has.
pub fn are_wanted() -> bool {
    std::env::var_os("CORELLA_EMULATED_TILES").is_some_and(|value| value == "1")
}

/// Installs the signal handler. Returns whether all instructions of the AMX kernels work from now on.
pub fn install() -> bool {
    detour::install()
}

thread_local! {
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::RELEASED) };
}

/// The general registers by their numbers in instructions.
type Registers = [u64; 16];

/// Returns the length of the tile instruction at `site`, at least five bytes; `None` if another instruction is there.
///
/// # Safety
/// `site` is an address that is about to be executed.
unsafe fn tile_instruction_bytes(site: *const u8) -> Option<usize> {
    // SAFETY: the caller upholds the contract.
    let (_, num_bytes) = unsafe { decode(site, site, &[0; 16]) }?;
    Some(num_bytes)
}

/// Executes the tile instruction at `code`, which is a copy of the instruction at `site`. Returns the length of the
/// instruction, or `None` if it is forbidden.
///
/// # Safety
/// `code` has a tile instruction that the thread was about to execute with these registers.
unsafe fn execute(code: *const u8, site: *const u8, registers: &Registers) -> Option<usize> {
    // SAFETY: the caller upholds the contract.
    let (instruction, num_bytes) = unsafe { decode(code, site, registers) }?;
    TILES.with(|tiles| {
        // SAFETY: the emulation executes no tile instruction, so this is the only reference to the thread's tiles. The
        // thread was about to execute the instruction itself, so it may access the memory that the instruction names.
        let is_done = unsafe { (*tiles.get()).execute(instruction) };
        is_done.then_some(num_bytes)
    })
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Instruction {
    LoadConfig(*const u8),
    Release,
    Zero(usize),
    Load {
        tile: usize,
        from: *const u8,
        stride: usize,
    },
    Store {
        tile: usize,
        to: *mut u8,
        stride: usize,
    },
    Multiply {
        element_type: ElementType,
        sums: usize,
        a: usize,
        b: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ElementType {
    Bf16Pairs,
    SignedBytes,
}

/// Decodes the instruction at `code`, which is a copy of the instruction at `site`. Returns the instruction and its
/// length, or `None` if it is no tile instruction.
///
/// # Safety
/// `code` has an instruction.
unsafe fn decode(
    code: *const u8,
    site: *const u8,
    registers: &Registers,
) -> Option<(Instruction, usize)> {
    // SAFETY: no byte is read before the previous ones have shown that it belongs to the instruction.
    let byte = |at: usize| unsafe { *code.add(at) };
    const VEX: u8 = 0xc4;
    const MAP_0F38: u8 = 2;
    if byte(0) != VEX || byte(1) & 0x1f != MAP_0F38 {
        return None;
    }
    let (extend, vex, opcode, modrm) = (!byte(1), byte(2), byte(3), byte(4));
    if vex & 0x84 != 0 {
        return None;
    }
    let (prefix, vvvv) = (vex & 3, usize::from(!vex >> 3 & 15));
    const NONE: u8 = 0;
    const X66: u8 = 1;
    const XF3: u8 = 2;
    const XF2: u8 = 3;
    let is_memory = modrm >> 6 != 3;
    let tile = usize::from(modrm >> 3 & 7);
    let element_type = match (opcode, prefix, is_memory) {
        (0x49, NONE, false) if modrm == 0xc0 => return Some((Instruction::Release, 5)),
        (0x49, XF2, false) if modrm & 7 == 0 => return Some((Instruction::Zero(tile), 5)),
        (0x5c, XF3, false) => ElementType::Bf16Pairs,
        (0x5e, XF2, false) => ElementType::SignedBytes,
        (0x49, NONE, true) | (0x4b, X66 | XF2 | XF3, true) => {
            // SAFETY: the bytes that follow belong to the same instruction.
            let operand = unsafe { MemoryOperand::decode(code.add(4), extend, site, registers) };
            let MemoryOperand { base, stride, .. } = operand;
            let instruction = match (opcode, prefix) {
                (0x49, _) => Instruction::LoadConfig(base.wrapping_add(stride)),
                (_, XF3) => Instruction::Store {
                    tile,
                    to: base.cast_mut(),
                    stride,
                },
                _ => Instruction::Load {
                    tile,
                    from: base,
                    stride,
                },
            };
            return Some((instruction, 4 + operand.num_bytes));
        }
        _ => return None,
    };
    let instruction = Instruction::Multiply {
        element_type,
        sums: tile,
        a: usize::from(modrm & 7),
        b: vvvv,
    };
    (vvvv < NUM_TILES).then_some((instruction, 5))
}

/// An operand in memory. The index register has the distance between the operand's rows in bytes.
struct MemoryOperand {
    base: *const u8,
    stride: usize,
    /// The length of the operand in the instruction: the ModRM byte, and the SIB byte and displacement if there are
    /// any.
    num_bytes: usize,
}

impl MemoryOperand {
    /// # Safety
    /// `modrm` points to the ModRM byte of an instruction whose operand is in memory. The instruction is a copy of the
    /// instruction at `site`.
    unsafe fn decode(modrm: *const u8, extend: u8, site: *const u8, registers: &Registers) -> Self {
        // SAFETY: no byte is read before the previous ones have shown that it belongs to the instruction.
        let byte = |at: usize| unsafe { *modrm.add(at) };
        let (mode, rm) = (byte(0) >> 6, byte(0) & 7);
        let has_index = rm == 4;
        let low = if has_index { byte(1) & 7 } else { rm };
        let displacement_at = if has_index { 2 } else { 1 };
        let is_absolute = mode == 0 && low == 5;
        let (displacement, displacement_bytes) = match mode {
            1 => (i64::from(byte(displacement_at).cast_signed()), 1),
            0 if !is_absolute => (0, 0),
            _ => {
                let bytes = [0, 1, 2, 3].map(|at| byte(displacement_at + at));
                (i64::from(i32::from_le_bytes(bytes)), 4)
            }
        };
        let num_bytes = displacement_at + displacement_bytes;
        let base = match is_absolute {
            false => registers[usize::from(low | (extend >> 5 & 1) << 3)],
            true if has_index => 0,
            true => site.addr() as u64 + 4 + num_bytes as u64,
        };
        const NO_INDEX: u8 = 4;
        let index = match has_index {
            true => byte(1) >> 3 & 7 | (extend >> 6 & 1) << 3,
            false => NO_INDEX,
        };
        let stride = match index {
            NO_INDEX => 0,
            index => registers[usize::from(index)] << (byte(1) >> 6),
        };
        Self {
            base: base.wrapping_add_signed(displacement) as *const u8,
            stride: stride as usize,
            num_bytes,
        }
    }
}

type Tile = [[u8; ROW_BYTES]; MAX_ROWS];

#[repr(align(64))]
struct Tiles {
    rows: [usize; NUM_TILES],
    row_bytes: [usize; NUM_TILES],
    tiles: [Tile; NUM_TILES],
}

impl Tiles {
    const RELEASED: Self = Self {
        rows: [0; NUM_TILES],
        row_bytes: [0; NUM_TILES],
        tiles: [[[0; ROW_BYTES]; MAX_ROWS]; NUM_TILES],
    };

    /// # Safety
    /// The memory that the instruction names may be read, or written.
    unsafe fn execute(&mut self, instruction: Instruction) -> bool {
        match instruction {
            Instruction::Release => *self = Self::RELEASED,
            // SAFETY: the caller upholds the contract.
            Instruction::LoadConfig(config) => return unsafe { self.configure(config) },
            Instruction::Zero(tile) => {
                if !self.is_configured(tile) {
                    return false;
                }
                self.tiles[tile] = [[0; ROW_BYTES]; MAX_ROWS];
            }
            Instruction::Load { tile, from, stride } => {
                if !self.is_configured(tile) {
                    return false;
                }
                self.tiles[tile] = [[0; ROW_BYTES]; MAX_ROWS];
                for row in 0..self.rows[tile] {
                    let from = from.wrapping_add(row.wrapping_mul(stride));
                    let to = self.tiles[tile][row].as_mut_ptr();
                    // SAFETY: the caller upholds the contract, and a row of a tile has at least as many bytes.
                    unsafe { copy_row(from, to, self.row_bytes[tile]) };
                }
            }
            Instruction::Store { tile, to, stride } => {
                if !self.is_configured(tile) {
                    return false;
                }
                for row in 0..self.rows[tile] {
                    let to = to.wrapping_add(row.wrapping_mul(stride));
                    let from = self.tiles[tile][row].as_ptr();
                    // SAFETY: the same as above.
                    unsafe { copy_row(from, to, self.row_bytes[tile]) };
                }
            }
            Instruction::Multiply {
                element_type,
                sums,
                a,
                b,
            } => {
                let fits = sums != a
                    && sums != b
                    && a != b
                    && [sums, a, b]
                        .into_iter()
                        .all(|tile| self.is_configured(tile))
                    && self.rows[sums] == self.rows[a]
                    && self.row_bytes[sums] == self.row_bytes[b]
                    && self.row_bytes[a] == 4 * self.rows[b];
                if !fits {
                    return false;
                }
                // SAFETY: AMX kernels are used only on processors with AVX-512.
                unsafe { self.multiply(element_type, sums, a, b) };
            }
        }
        true
    }

    fn is_configured(&self, tile: usize) -> bool {
        self.rows[tile] > 0 && self.row_bytes[tile] > 0
    }

    /// # Safety
    /// `config` has 64 bytes.
    unsafe fn configure(&mut self, config: *const u8) -> bool {
        // SAFETY: the caller upholds the contract.
        let config = unsafe { config.cast::<[u8; 64]>().read_unaligned() };
        *self = Self::RELEASED;
        if config[0] == 0 {
            return true;
        }
        for tile in 0..NUM_TILES {
            let at = 16 + 2 * tile;
            self.row_bytes[tile] = usize::from(u16::from_le_bytes([config[at], config[at + 1]]));
            self.rows[tile] = usize::from(config[48 + tile]);
        }
        let is_unused = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
        config[0] == 1
            && is_unused(&config[1..16])
            && is_unused(&config[32..48])
            && is_unused(&config[56..])
            && (0..NUM_TILES).all(|tile| {
                self.rows[tile] <= MAX_ROWS
                    && self.row_bytes[tile] <= ROW_BYTES
                    && (self.rows[tile] == 0) == (self.row_bytes[tile] == 0)
            })
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    fn multiply(&mut self, element_type: ElementType, sums: usize, a: usize, b: usize) {
        let (num_rows, num_steps) = (self.rows[sums], self.rows[b]);
        let split = match element_type {
            ElementType::Bf16Pairs => split_pairs,
            ElementType::SignedBytes => split_bytes,
        };
        let mut columns = [[_mm512_setzero_si512(); 2]; MAX_ROWS];
        for (column, row) in columns.iter_mut().zip(&self.tiles[b][..num_steps]) {
            // SAFETY: a row of a tile is one vector.
            *column = unsafe { split(_mm512_loadu_si512(row.as_ptr().cast())) };
        }
        let columns = &columns[..num_steps];
        // Sums of several rows at once hide the time that each addition takes.
        for first in (0..num_rows).step_by(ROWS_AT_ONCE) {
            let mut rows: HalvesOfRows = [[[0; ROW_BYTES / 4]; 2]; ROWS_AT_ONCE];
            let mut of_rows = [_mm512_setzero_si512(); ROWS_AT_ONCE];
            for at in 0..ROWS_AT_ONCE {
                // SAFETY: rows of tiles, and lists of as many bytes, are one vector each.
                unsafe {
                    let row = self.tiles[a][first + at].as_ptr();
                    for (half, to) in split(_mm512_loadu_si512(row.cast()))
                        .iter()
                        .zip(&mut rows[at])
                    {
                        _mm512_storeu_si512(to.as_mut_ptr().cast(), *half);
                    }
                    let sum = self.tiles[sums][first + at].as_ptr();
                    of_rows[at] = _mm512_loadu_si512(sum.cast());
                }
            }
            let of_rows = match element_type {
                ElementType::Bf16Pairs => add_bf16_pairs(of_rows, &rows, columns),
                ElementType::SignedBytes => add_signed_bytes(of_rows, &rows, columns),
            };
            for (sum, row) in of_rows.iter().zip(first..num_rows) {
                // SAFETY: the same as above.
                unsafe { _mm512_storeu_si512(self.tiles[sums][row].as_mut_ptr().cast(), *sum) };
            }
        }
    }
}

const ROWS_AT_ONCE: usize = 4;
const _: () = assert!(MAX_ROWS.is_multiple_of(ROWS_AT_ONCE));

/// The two halves of each group of four bytes, for several rows.
type HalvesOfRows = [[[i32; ROW_BYTES / 4]; 2]; ROWS_AT_ONCE];

/// # Safety
/// Both places have `num_bytes` bytes.
unsafe fn copy_row(from: *const u8, to: *mut u8, num_bytes: usize) {
    // SAFETY: the caller upholds the contract. A constant length becomes one instruction.
    unsafe {
        match num_bytes {
            ROW_BYTES => from.copy_to(to, ROW_BYTES),
            _ => from.copy_to(to, num_bytes),
        }
    }
}

/// Adds in the order of the manual: the products of first elements and of second elements have separate sums, and the
/// total of both is added to `sums`.
#[target_feature(enable = "avx512f,avx512bw")]
fn add_bf16_pairs(
    sums: [__m512i; ROWS_AT_ONCE],
    rows: &HalvesOfRows,
    columns: &[[__m512i; 2]],
) -> [__m512i; ROWS_AT_ONCE] {
    let mut halves = [[_mm512_setzero_ps(); 2]; ROWS_AT_ONCE];
    for (step, column) in columns.iter().enumerate() {
        for (row, sums) in rows.iter().zip(&mut halves) {
            for half in 0..2 {
                let a = _mm512_castsi512_ps(_mm512_set1_epi32(row[half][step]));
                let b = _mm512_castsi512_ps(column[half]);
                sums[half] = flushed(_mm512_fmadd_ps(a, b, sums[half]));
            }
        }
    }
    let mut sums = sums;
    for (sum, [firsts, seconds]) in sums.iter_mut().zip(halves) {
        let pairs = flushed(_mm512_add_ps(firsts, seconds));
        let before = flushed(_mm512_castsi512_ps(*sum));
        *sum = _mm512_castps_si512(flushed(_mm512_add_ps(before, pairs)));
    }
    sums
}

/// Returns the first and the second elements of pairs in bf16, in f32.
#[target_feature(enable = "avx512f,avx512bw")]
fn split_pairs(pairs: __m512i) -> [__m512i; 2] {
    let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    [_mm512_slli_epi32(pairs, 16), _mm512_and_si512(pairs, high)]
        .map(|x| _mm512_castps_si512(flushed(_mm512_castsi512_ps(x))))
}

/// Replaces subnormal numbers by zeros of the same sign.
#[target_feature(enable = "avx512f")]
fn flushed(x: __m512) -> __m512 {
    const EXPONENT: i32 = 0x7f80_0000;
    let bits = _mm512_castps_si512(x);
    let is_small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(EXPONENT));
    let sign = _mm512_set1_epi32(i32::MIN);
    _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, is_small, bits, sign))
}

/// Adds the products of four bytes, two at a time: 32 bits hold the sum of two products without overflow. Longer sums
/// wrap around, as the manual says.
#[target_feature(enable = "avx512f,avx512bw")]
fn add_signed_bytes(
    sums: [__m512i; ROWS_AT_ONCE],
    rows: &HalvesOfRows,
    columns: &[[__m512i; 2]],
) -> [__m512i; ROWS_AT_ONCE] {
    let mut sums = sums;
    for (step, column) in columns.iter().enumerate() {
        for (row, sum) in rows.iter().zip(&mut sums) {
            for half in 0..2 {
                let a = _mm512_set1_epi32(row[half][step]);
                *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(a, column[half]));
            }
        }
    }
    sums
}

/// Returns the bytes at even and at odd places, as integers of 16 bits.
#[target_feature(enable = "avx512f,avx512bw")]
fn split_bytes(bytes: __m512i) -> [__m512i; 2] {
    let even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
    [even, _mm512_srai_epi16(bytes, 8)]
}
