//! Loaded before the C library by `LD_PRELOAD`: makes the writes of a real tool fail, one after another.
//!
//! Stands between a process and the calls that move or keep bytes of files in the folder `K3_FAULT_DIR`: `write`, `pwrite`,
//! `ftruncate`, `fsync`. They are numbered from 0 in the order they are made. From number `K3_FAULT_AT` on something is
//! wrong, as `K3_FAULT` says:
//!
//! - `full`: no space, then and ever after (`fsync` and cutting need none);
//! - `io`: that call fails with an input or output error, the next does not;
//! - `short`: every write takes half of what it is given, in whole blocks where there are several;
//! - `interrupted`: every second write is interrupted before it has done anything;
//! - `none`: nothing, but the log has a line for each call: its name and the file;
//! - `kill-before`, `kill-within`, `kill-after`: the process is killed at that call, which is not made, writes half of its bytes, or is
//!   made whole.
//!
//! The file `K3_FAULT_LOG` is made when the first fault is raised. Compiled by the test that uses it with `rustc` alone; product code has no such
//! hook.
use std::{
    ffi::{CStr, OsString, c_char, c_int, c_long, c_void},
    io::Write as _,
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

const EINTR: c_int = 4;
const EIO: c_int = 5;
const ENOSPC: c_int = 28;
const BLOCK: usize = 4096;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
    fn raise(signal: c_int) -> c_int;
}

struct Settings {
    dir: PathBuf,
    log: PathBuf,
    kind: OsString,
    at: usize,
}

fn settings() -> Option<&'static Settings> {
    static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();
    let read = || {
        Some(Settings {
            dir: std::env::var_os("K3_FAULT_DIR")?.into(),
            log: std::env::var_os("K3_FAULT_LOG")?.into(),
            kind: std::env::var_os("K3_FAULT")?,
            at: std::env::var("K3_FAULT_AT").ok()?.parse().ok()?,
        })
    };
    SETTINGS.get_or_init(read).as_ref()
}

#[derive(PartialEq)]
enum Call {
    /// Of so many bytes.
    Write(usize),
    Other,
}

enum Fault {
    Error(c_int),
    /// This many bytes only.
    Short(usize),
    /// The end of the process.
    KillNow,
    /// The same after this many bytes, or after all.
    Kill(Option<usize>),
}

/// What is to go wrong with this call on `fd`.
fn fault(name: &CStr, fd: RawFd, call: &Call) -> Option<Fault> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let settings = settings()?;
    let file = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    if !file.starts_with(&settings.dir) {
        return None;
    }
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    if settings.kind == "none" {
        note(&settings.log, name, &file);
        return None;
    }
    let fault = match (settings.kind.to_str()?, call) {
        ("full", Call::Write(_)) if number >= settings.at => Fault::Error(ENOSPC),
        ("kill-before", _) if number == settings.at => Fault::KillNow,
        ("kill-within", &Call::Write(bytes)) if number == settings.at => {
            Fault::Kill(Some(half(bytes)))
        }
        ("kill-after", _) if number == settings.at => Fault::Kill(None),
        ("io", _) if number == settings.at => Fault::Error(EIO),
        ("interrupted", Call::Write(_)) if number % 2 == settings.at % 2 => Fault::Error(EINTR),
        // Half a block is what no direct write may leave.
        ("short", &Call::Write(bytes)) if bytes > 1 && bytes != BLOCK => Fault::Short(half(bytes)),
        _ => return None,
    };
    let _ = std::fs::File::create(&settings.log);
    Some(fault)
}

/// Add a line to the log, which lies outside the folder.
fn note(log: &Path, name: &CStr, file: &Path) {
    let line = format!("{} {}\n", name.to_string_lossy(), file.display());
    if let Ok(mut log) = std::fs::File::options().create(true).append(true).open(log) {
        let _ = log.write_all(line.as_bytes());
    }
}

fn half(bytes: usize) -> usize {
    if bytes >= 2 * BLOCK {
        bytes / 2 / BLOCK * BLOCK
    } else {
        bytes / 2
    }
}

fn kill() -> ! {
    const SIGKILL: c_int = 9;
    loop {
        // SAFETY: it takes a number and ends the process.
        unsafe { raise(SIGKILL) };
    }
}

fn fail(errno: c_int) {
    // SAFETY: the C library gives every thread an errno of its own.
    unsafe { *__errno_location() = errno };
}

/// The C library's own function of a name, after ours.
fn next(name: &CStr) -> *mut c_void {
    const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
    // SAFETY: the name is a C string, and the handle one that `dlsym` defines.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}

macro_rules! stand_between {
    ($($name:ident as $text:literal ($($arg:ident: $type:ty),*) -> $ret:ty, $call:expr, $bytes:expr;)*) => {$(
        /// See the module.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int $(, $arg: $type)*) -> $ret {
            static REAL: OnceLock<usize> = OnceLock::new();
            let real = *REAL.get_or_init(|| next($text) as usize);
            // SAFETY: it is the function of this name in the C library, which has this type.
            let real: unsafe extern "C" fn(c_int $(, $type)*) -> $ret = unsafe { std::mem::transmute(real) };
            let shorten: fn(usize $(, $type)*) -> ($($type,)*) = $bytes;
            match fault($text, fd, &$call) {
                // SAFETY: as the caller's.
                None => unsafe { real(fd $(, $arg)*) },
                Some(Fault::Error(errno)) => {
                    fail(errno);
                    -1
                }
                Some(Fault::KillNow) => kill(),
                Some(Fault::Kill(None)) => {
                    // SAFETY: as the caller's.
                    unsafe { real(fd $(, $arg)*) };
                    kill()
                }
                Some(Fault::Kill(Some(bytes))) => {
                    let ($($arg,)*) = shorten(bytes $(, $arg)*);
                    // SAFETY: fewer bytes of the same memory.
                    unsafe { real(fd $(, $arg)*) };
                    kill()
                }
                Some(Fault::Short(bytes)) => {
                    let ($($arg,)*) = shorten(bytes $(, $arg)*);
                    // SAFETY: fewer bytes of the same memory.
                    unsafe { real(fd $(, $arg)*) }
                }
            }
        }
    )*};
}

stand_between! {
    write as c"write" (from: *const c_void, bytes: usize) -> isize, Call::Write(bytes), |n, from, _| (from, n);
    pwrite64 as c"pwrite64" (from: *const c_void, bytes: usize, at: c_long) -> isize, Call::Write(bytes),
        |n, from, _, at| (from, n, at);
    ftruncate64 as c"ftruncate64" (len: c_long) -> c_int, Call::Other, |_, len| (len,);
    fsync as c"fsync" () -> c_int, Call::Other, |_| ();
}
