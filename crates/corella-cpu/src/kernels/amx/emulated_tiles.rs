//! Software emulation of AMX tiles, so that AMX kernels can be tested (not timed) on machines that
//! have AVX-512 but no tiles.
//!
//! A processor without tiles raises an illegal-instruction signal for their instructions. The
//! signal handler does what Intel's manual says of the instruction (Software Developer's Manual,
//! volume 2), rounding and subnormal numbers included, and continues behind it. What the manual
//! forbids ends the process, as it would on hardware.

use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::ptr::null_mut;

const NUM_TILES: usize = 8;
const MAX_ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Installs the signal handler. Returns whether all instructions of the AMX kernels work from now
/// on.
pub fn install() -> bool {
    // SAFETY: all zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler does not allocate or lock, and touches only data of its own thread.
    unsafe { libc::sigaction(libc::SIGILL, &action, null_mut()) == 0 }
}

thread_local! {
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::RELEASED) };
}

extern "C" fn handle(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: this is the context that the system passes; nobody else uses it while the handler
    // runs.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    TILES.with(|tiles| {
        // SAFETY: the handler executes no tile instruction, so it is never entered recursively.
        let tiles = unsafe { &mut *tiles.get() };
        // SAFETY: the thread was about to continue there, since a tile instruction is no jump.
        unsafe {
            if !tiles.step(registers) {
                // The thread meets the instruction again, and the default action ends the process.
                libc::signal(libc::SIGILL, libc::SIG_DFL);
                return;
            }
            // A signal takes much longer than an instruction, so those that follow are emulated
            // here too.
            while tiles.step(registers) {}
        }
    });
}

type Registers = [libc::greg_t; 23];
const RIP: usize = libc::REG_RIP as usize;

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

/// Decodes the instruction at `code`. Returns it with its length, or `None` if it has nothing to do
/// with tiles.
///
/// # Safety
/// `code` is an address that is about to be executed.
unsafe fn decode(code: *const u8, registers: &Registers) -> Option<(Instruction, usize)> {
    // SAFETY: no byte is read before the previous ones have shown that it belongs to the
    // instruction.
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
            let operand = unsafe { MemoryOperand::decode(code.add(4), extend, registers) };
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

/// An operand in memory, whose rows are `stride` bytes apart, as the index register says.
struct MemoryOperand {
    base: *const u8,
    stride: usize,
    /// The length of ModRM and the bytes that belong to it.
    num_bytes: usize,
}

impl MemoryOperand {
    /// # Safety
    /// `modrm` is where an instruction's ModRM is, and names memory.
    unsafe fn decode(modrm: *const u8, extend: u8, registers: &Registers) -> Self {
        // SAFETY: no byte is read before the previous ones have shown that it belongs to the
        // instruction.
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
            false => registers[place_of(low | (extend >> 5 & 1) << 3)],
            true if has_index => 0,
            true => modrm.wrapping_add(num_bytes) as i64,
        };
        const NO_INDEX: u8 = 4;
        let index = match has_index {
            true => byte(1) >> 3 & 7 | (extend >> 6 & 1) << 3,
            false => NO_INDEX,
        };
        let stride = match index {
            NO_INDEX => 0,
            index => registers[place_of(index)] << (byte(1) >> 6),
        };
        Self {
            base: base.wrapping_add(displacement) as *const u8,
            stride: stride as usize,
            num_bytes,
        }
    }
}

/// Where the system stores the register with this number in instructions.
fn place_of(register: u8) -> usize {
    use libc::*;
    let places = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9,
        REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    places[usize::from(register)] as usize
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

    /// Skips `nop`s and executes the next instruction, if it is a tile instruction and allowed.
    /// Returns whether it was.
    ///
    /// # Safety
    /// The registers are those of a thread that is about to continue.
    unsafe fn step(&mut self, registers: &mut Registers) -> bool {
        const NOP: u8 = 0x90;
        // SAFETY: the caller promises that the code is about to be executed.
        let next = unsafe {
            while *(registers[RIP] as *const u8) == NOP {
                registers[RIP] += 1;
            }
            decode(registers[RIP] as *const u8, registers)
        };
        let Some((instruction, num_bytes)) = next else {
            return false;
        };
        // SAFETY: the thread would execute this instruction itself.
        let is_done = unsafe { self.execute(instruction) };
        if is_done {
            registers[RIP] += num_bytes as i64;
        }
        is_done
    }

    /// # Safety
    /// The memory that the instruction names may be read, or written.
    unsafe fn execute(&mut self, instruction: Instruction) -> bool {
        match instruction {
            Instruction::Release => *self = Self::RELEASED,
            // SAFETY: the caller promises as much.
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
                    // SAFETY: the caller promises as much, and a row of a tile has at least as many
                    // bytes.
                    unsafe { from.copy_to(to, self.row_bytes[tile]) };
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
                    unsafe { from.copy_to(to, self.row_bytes[tile]) };
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
                // SAFETY: AMX kernels are used only if AVX-512 is there.
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
        // SAFETY: the caller promises as much.
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

    #[target_feature(enable = "avx512f")]
    fn multiply(&mut self, element_type: ElementType, sums: usize, a: usize, b: usize) {
        let num_steps = self.rows[b];
        for row in 0..self.rows[sums] {
            let a = &self.tiles[a][row];
            let b = &self.tiles[b][..num_steps];
            // SAFETY: a row of a tile is one vector.
            let sum = unsafe { _mm512_loadu_si512(self.tiles[sums][row].as_ptr().cast()) };
            let sum = match element_type {
                ElementType::Bf16Pairs => add_bf16_pairs(sum, a, b),
                ElementType::SignedBytes => add_signed_bytes(sum, a, b),
            };
            // SAFETY: the same as above.
            unsafe { _mm512_storeu_si512(self.tiles[sums][row].as_mut_ptr().cast(), sum) };
        }
    }
}

/// Returns four bytes of `a` repeated in every lane, and the four bytes of each lane's column of
/// `b`.
#[target_feature(enable = "avx512f")]
fn operands(a: &[u8; ROW_BYTES], b: &[[u8; ROW_BYTES]], step: usize) -> (__m512i, __m512i) {
    let bytes = [0, 1, 2, 3].map(|at| a[4 * step + at]);
    // SAFETY: a row of a tile is one vector.
    let b = unsafe { _mm512_loadu_si512(b[step].as_ptr().cast()) };
    (_mm512_set1_epi32(i32::from_le_bytes(bytes)), b)
}

/// Sums the products of first elements and of second elements separately, adds the two sums, and
/// adds that to `sum`, which is the order that the manual gives.
#[target_feature(enable = "avx512f")]
fn add_bf16_pairs(sum: __m512i, a: &[u8; ROW_BYTES], b: &[[u8; ROW_BYTES]]) -> __m512i {
    let mut firsts = _mm512_setzero_ps();
    let mut seconds = _mm512_setzero_ps();
    for step in 0..b.len() {
        let (a, b) = operands(a, b, step);
        firsts = flushed(_mm512_fmadd_ps(first(a), first(b), firsts));
        seconds = flushed(_mm512_fmadd_ps(second(a), second(b), seconds));
    }
    let sum = flushed(_mm512_castsi512_ps(sum));
    let pairs = flushed(_mm512_add_ps(firsts, seconds));
    _mm512_castps_si512(flushed(_mm512_add_ps(sum, pairs)))
}

#[target_feature(enable = "avx512f")]
fn first(pairs: __m512i) -> __m512 {
    flushed(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)))
}

#[target_feature(enable = "avx512f")]
fn second(pairs: __m512i) -> __m512 {
    let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    flushed(_mm512_castsi512_ps(_mm512_and_si512(pairs, high)))
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

#[target_feature(enable = "avx512f")]
fn add_signed_bytes(mut sum: __m512i, a: &[u8; ROW_BYTES], b: &[[u8; ROW_BYTES]]) -> __m512i {
    for step in 0..b.len() {
        let (a, b) = operands(a, b, step);
        for product in [
            product_of_top::<24>(a, b),
            product_of_top::<16>(a, b),
            product_of_top::<8>(a, b),
            product_of_top::<0>(a, b),
        ] {
            sum = _mm512_add_epi32(sum, product);
        }
    }
    sum
}

/// Multiplies one byte of each 32-bit lane: the one that is on top after a shift by `SHIFT` bits.
#[target_feature(enable = "avx512f")]
fn product_of_top<const SHIFT: u32>(a: __m512i, b: __m512i) -> __m512i {
    let a = _mm512_srai_epi32(_mm512_slli_epi32(a, SHIFT), 24);
    let b = _mm512_srai_epi32(_mm512_slli_epi32(b, SHIFT), 24);
    _mm512_mullo_epi32(a, b)
}
