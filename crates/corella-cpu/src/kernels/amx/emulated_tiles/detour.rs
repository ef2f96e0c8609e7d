//! A detour: a jump in the place of a tile instruction, to code that emulates the instruction.
//!
//! A signal takes ten times longer than most emulated instructions. So the signal handler only builds a detour, and
//! threads take the detour from then on. Another thread may execute the instruction while it is replaced: the first
//! byte is invalid until all others are written, and a thread that meets it waits in the handler.

use std::arch::naked_asm;
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::{Registers, execute, tile_instruction_bytes};

/// The code after one jump.
#[repr(C, packed)]
struct Detour {
    /// `lea rsp, [rsp - RED_ZONE]`, because the kernel may keep data below its stack.
    leave_red_zone: [u8; 5],
    /// `call [rip + entry]`.
    call: [u8; 2],
    entry: i32,
    /// `call` pushes the address of this field.
    site: *const u8,
    /// The replaced instruction, and bytes after it.
    original: [u8; MAX_INSTRUCTION_BYTES],
}

const MAX_INSTRUCTION_BYTES: usize = 15;
const RED_ZONE: u64 = 128;

/// Memory for detours, near enough to this program's code for jumps.
struct Area {
    /// The first eight bytes are the address of `enter`.
    start: *mut u8,
    num_used: usize,
}

// SAFETY: the memory belongs to the process.
unsafe impl Send for Area {}

const AREA_BYTES: usize = 1 << 20;
static AREA: OnceLock<Mutex<Area>> = OnceLock::new();

/// Installs the signal handler that builds detours. Returns whether the system permits them.
pub fn install() -> bool {
    let Some(area) = Area::new() else {
        return false;
    };
    if AREA.set(Mutex::new(area)).is_err() || !membarrier(REGISTER) {
        return false;
    }
    // SAFETY: all zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler does not allocate, and no thread that holds its lock executes a tile instruction.
    unsafe { libc::sigaction(libc::SIGILL, &action, null_mut()) == 0 }
}

extern "C" fn handle(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the thread's context, and the handler has the only reference to it.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let site = registers[libc::REG_RIP as usize] as *mut u8;
    let mut area = AREA.get().map(lock);
    let is_there = area.as_mut().is_some_and(|area| {
        // SAFETY: the thread is about to execute the code there, and only the owner of the lock changes it.
        unsafe {
            area.has_detour(site)
                || tile_instruction_bytes(site).is_some_and(|num| area.add_detour(site, num))
        }
    });
    if !is_there {
        // The thread meets the instruction again, and the default action ends the process.
        // SAFETY: the default action is always permitted.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

fn lock(area: &Mutex<Area>) -> std::sync::MutexGuard<'_, Area> {
    area.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Area {
    fn new() -> Option<Self> {
        use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_EXEC, PROT_READ, PROT_WRITE};
        let near = (install as *const u8).wrapping_sub(1 << 28);
        let near = near.map_addr(|address| address & !(AREA_BYTES - 1));
        // SAFETY: the address is only a hint, so no existing mapping is replaced.
        let start = unsafe {
            let protection = PROT_READ | PROT_WRITE | PROT_EXEC;
            let near = near.cast_mut().cast();
            libc::mmap(
                near,
                AREA_BYTES,
                protection,
                MAP_PRIVATE | MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == MAP_FAILED || start.addr().abs_diff((install as *const u8).addr()) > 1 << 30 {
            return None;
        }
        let enter: unsafe extern "C" fn() = enter;
        // SAFETY: the area is this long, and aligned to pages.
        unsafe { start.cast::<usize>().write(enter as usize) };
        Some(Self {
            start: start.cast(),
            num_used: size_of::<usize>(),
        })
    }

    /// # Safety
    /// `site` is an address that is about to be executed.
    unsafe fn has_detour(&self, site: *const u8) -> bool {
        // SAFETY: the caller upholds the contract, and the bytes after a jump's first byte belong to the jump.
        unsafe {
            site.read() == JUMP && {
                let distance = site.add(1).cast::<i32>().read_unaligned();
                let target = site.wrapping_offset(JUMP_BYTES as isize + distance as isize);
                target.addr().wrapping_sub(self.start.addr()) < AREA_BYTES
            }
        }
    }

    /// Replaces a tile instruction by a jump. Returns whether that was possible.
    ///
    /// # Safety
    /// `site` has a tile instruction of this length, which a thread is about to execute.
    unsafe fn add_detour(&mut self, site: *mut u8, num_bytes: usize) -> bool {
        let at = self.start.wrapping_add(self.num_used);
        let next = self.num_used + size_of::<Detour>();
        let call_end = at.wrapping_add(offset_of!(Detour, site));
        let jump_end = site.wrapping_add(JUMP_BYTES);
        let (Some(entry), Some(jump)) = (distance(call_end, self.start), distance(jump_end, at))
        else {
            return false;
        };
        if next > AREA_BYTES || !make_writable(site) {
            return false;
        }
        let mut detour = Detour {
            leave_red_zone: [0x48, 0x8d, 0x64, 0x24, (RED_ZONE as u8).wrapping_neg()],
            call: [0xff, 0x15],
            entry,
            site,
            original: [0; MAX_INSTRUCTION_BYTES],
        };
        // SAFETY: the caller promises the instruction, and tile instructions are at least as long as the jump. The
        // first byte is invalid until all others are replaced, so no thread executes a mixture.
        unsafe {
            site.copy_to(detour.original.as_mut_ptr(), num_bytes);
            at.cast::<Detour>().write_unaligned(detour);
            AtomicU8::from_ptr(site).store(INVALID, Ordering::SeqCst);
            membarrier(SYNC);
            site.add(1).cast::<i32>().write_unaligned(jump);
            membarrier(SYNC);
            AtomicU8::from_ptr(site).store(JUMP, Ordering::SeqCst);
        }
        self.num_used = next;
        true
    }
}

/// `jmp` with the distance to its target in four bytes.
const JUMP: u8 = 0xe9;
const JUMP_BYTES: usize = 5;
/// No instruction begins with this byte.
const INVALID: u8 = 0x06;

/// The distance for a jump or a call that ends at `from`.
fn distance(from: *const u8, to: *const u8) -> Option<i32> {
    let distance = (to.addr() as i64).wrapping_sub(from.addr() as i64);
    i32::try_from(distance).ok()
}

fn make_writable(site: *mut u8) -> bool {
    const PAGE_BYTES: usize = 4096;
    let page = site.map_addr(|address| address & !(PAGE_BYTES - 1));
    let num_bytes = site.addr() + JUMP_BYTES - page.addr();
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    // SAFETY: the code stays readable and executable.
    unsafe { libc::mprotect(page.cast(), num_bytes, protection) == 0 }
}

const REGISTER: libc::c_int = libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE;
const SYNC: libc::c_int = libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE;

/// Lets all threads see earlier writes before their next instruction, or asks for the permission to do so.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes integers, and changes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// The registers that `enter` saves, besides vectors.
#[repr(C)]
struct Saved {
    registers: Registers,
    flags: u64,
    /// The address of a detour's field `site`, and later the address at which the thread continues.
    resume: *const u8,
}

/// Emulates the instruction of a detour.
extern "C" fn emulate(saved: &mut Saved) {
    const STACK_POINTER: usize = 4;
    let above = (&raw const *saved).wrapping_add(1);
    saved.registers[STACK_POINTER] = above.addr() as u64 + RED_ZONE;
    let before = offset_of!(Detour, site);
    let detour = saved.resume.wrapping_sub(before).cast::<Detour>();
    // SAFETY: a detour calls `enter`, which pushes this address.
    let Detour { site, original, .. } = unsafe { detour.read_unaligned() };
    // SAFETY: the thread was about to execute this instruction.
    match unsafe { execute(original.as_ptr(), site, &saved.registers) } {
        Some(num_bytes) => saved.resume = site.wrapping_add(num_bytes),
        // SAFETY: the default action ends the process.
        None => unsafe {
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            libc::raise(libc::SIGILL);
        },
    }
}

/// Saves all registers and flags, calls `emulate`, restores the registers and flags, and continues after the
/// instruction. `emulate` runs with the usual rounding, as tiles do.
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    naked_asm!(
        "pushfq",
        ".irp r, r15, r14, r13, r12, r11, r10, r9, r8, rdi, rsi, rbp, rsp, rbx, rdx, rcx, rax",
        "push \\r",
        ".endr",
        "mov rbp, rsp",
        "mov rdi, rsp",
        "and rsp, -64",
        "sub rsp, {vectors} + {masks} + 64",
        ".irp i, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
        "vmovdqu64 [rsp + 64*\\i], zmm\\i",
        ".endr",
        ".irp i, 0,1,2,3,4,5,6,7",
        "kmovq [rsp + {vectors} + 8*\\i], k\\i",
        ".endr",
        "stmxcsr [rsp + {vectors} + {masks}]",
        "mov dword ptr [rsp + {vectors} + {masks} + 4], {usual_rounding}",
        "ldmxcsr [rsp + {vectors} + {masks} + 4]",
        "cld",
        "call {emulate}",
        "ldmxcsr [rsp + {vectors} + {masks}]",
        ".irp i, 0,1,2,3,4,5,6,7",
        "kmovq k\\i, [rsp + {vectors} + 8*\\i]",
        ".endr",
        ".irp i, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
        "vmovdqu64 zmm\\i, [rsp + 64*\\i]",
        ".endr",
        "mov rsp, rbp",
        ".irp r, rax, rcx, rdx, rbx",
        "pop \\r",
        ".endr",
        "lea rsp, [rsp + 8]",
        ".irp r, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15",
        "pop \\r",
        ".endr",
        "popfq",
        "ret {red_zone}",
        emulate = sym emulate,
        vectors = const 32 * 64,
        masks = const 8 * 8,
        usual_rounding = const 0x1f80,
        red_zone = const RED_ZONE,
    )
}
