//! Arguments for functions of the interface that the bytes of a fuzz target choose: objects of every
//! type, also the wrong one and after their deletion, null, numbers out of range, strings that are not
//! UTF-8. All keep the contract of this package.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::object::Object;

/// The length of arrays and strings: what a function reads at most.
const LONGEST: usize = 4096;

/// The bytes that choose arguments, and what the arguments point to.
pub(crate) struct Source<'d> {
    rest: &'d [u8],
    /// Objects of all types, some of them deleted.
    pub(crate) objects: Vec<*mut c_void>,
    /// Arrays, strings and places for results. They stay as long as the run.
    blocks: Vec<Box<[u64]>>,
    /// Places for objects of the current call.
    results: Vec<*mut *mut c_void>,
}

impl<'d> Source<'d> {
    /// Creates a source with some objects.
    pub(crate) fn new(data: &'d [u8], objects: Vec<*mut c_void>) -> Self {
        Self { rest: data, objects, blocks: Vec::new(), results: Vec::new() }
    }

    /// Returns the next byte; 0 at the end.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        *first
    }

    /// Returns the number of the next call; `None` at the end.
    pub(crate) fn next_number(&mut self) -> Option<u16> {
        let (number, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u16::from_le_bytes(*number))
    }

    /// Returns an object of any type, or null.
    fn object(&mut self) -> *mut c_void {
        let chosen = usize::from(self.byte());
        // The newest objects come first, because calls that belong together follow each other.
        let from_end = self.objects.len().checked_sub(chosen % (self.objects.len() + 1));
        from_end.and_then(|at| self.objects.get(at)).copied().unwrap_or(ptr::null_mut())
    }

    /// Returns memory of [`LONGEST`] bytes, aligned for every number.
    fn block(&mut self) -> *mut u64 {
        let mut block = vec![0_u64; LONGEST / 8].into_boxed_slice();
        let start = block.as_mut_ptr();
        self.blocks.push(block);
        start
    }

    /// Returns a place for a result, which has a small number before the call; sometimes null.
    fn place(&mut self) -> *mut u64 {
        match self.byte() {
            u8::MAX => ptr::null_mut(),
            before => {
                let place = self.block();
                // SAFETY: the block is longer.
                unsafe { place.write(u64::from(before % 4)) };
                place
            }
        }
    }

    /// Returns a string: a name of the model or two bytes, which may be no UTF-8.
    fn text(&mut self) -> *const c_char {
        const NAMES: [&str; 6] =
            ["INPUT0", "OUTPUT0", "OUTPUT_STATE", "m", "{\"name\":\"m\"}", "BOOL"];
        let chosen = self.byte();
        if chosen == u8::MAX {
            return ptr::null();
        }
        let own = [self.byte(), self.byte()];
        let text = NAMES.get(usize::from(chosen)).map_or(&own[..], |name| name.as_bytes());
        let start = self.block().cast::<u8>();
        // SAFETY: the block is longer, and its zeros end the string.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), start, text.len()) };
        start.cast()
    }

    /// Returns an array of [`LONGEST`] / 8 small numbers; sometimes null.
    fn numbers(&mut self) -> *const u64 {
        match self.byte() {
            u8::MAX => ptr::null(),
            number => {
                let start = self.block();
                for at in 0..LONGEST / 8 {
                    // SAFETY: within the block.
                    unsafe { start.add(at).write(u64::from(number % 5)) };
                }
                start
            }
        }
    }

    /// Returns a number: small, or the largest.
    fn number(&mut self) -> u64 {
        match self.byte() {
            u8::MAX => u64::MAX,
            // What functions count or measure with it is never longer than a block.
            small => u64::from(small) * 2,
        }
    }

    /// Adds the objects that the last call has created.
    pub(crate) fn collect_results(&mut self) {
        for place in self.results.drain(..) {
            // SAFETY: the first pointer of a block.
            let made = unsafe { place.read() };
            if !made.is_null() && !self.objects.contains(&made) {
                self.objects.push(made);
            }
        }
    }
}

/// An argument of a function of the interface.
pub(crate) trait Argument {
    /// Chooses one.
    fn take(source: &mut Source<'_>) -> Self;
}

impl<T> Argument for *mut Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        source.object().cast()
    }
}

impl<T> Argument for *const Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        source.object().cast()
    }
}

impl<T> Argument for *mut *mut Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        let place = if source.byte() == u8::MAX { return ptr::null_mut() } else { source.block() };
        source.results.push(place.cast());
        place.cast()
    }
}

impl<T> Argument for *const *const Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        let objects = [source.object(), source.object()];
        let start = source.block().cast::<*mut c_void>();
        for at in 0..LONGEST / size_of::<*mut c_void>() {
            let object = objects.get(at % 2).copied().unwrap_or(ptr::null_mut());
            // SAFETY: within the block.
            unsafe { start.add(at).write(object) };
        }
        start.cast_const().cast()
    }
}

/// Implements [`Argument`] with an expression over the source.
macro_rules! arguments {
    ($($type:ty => |$source:ident| $value:expr;)*) => { $(
        impl Argument for $type {
            fn take($source: &mut Source<'_>) -> Self {
                $value
            }
        }
    )* };
}

arguments! {
    bool => |source| source.byte() % 2 == 1;
    c_int => |source| c_int::from(source.byte().cast_signed()) % 32;
    u32 => |source| u32::from(source.byte()) % 8;
    u64 => |source| source.number();
    i64 => |source| i64::from(source.byte().cast_signed());
    usize => |source| usize::try_from(source.number()).unwrap_or(usize::MAX);
    f64 => |source| f64::from(source.byte().cast_signed()) / 4.0;
    *const c_char => |source| source.text();
    *const i64 => |source| source.numbers().cast();
    *const u64 => |source| source.numbers();
    *const f64 => |source| source.numbers().cast();
    *const usize => |source| source.numbers().cast();
    // The value of a parameter: its kind says what it is.
    *const c_void => |source| source.text().cast();
    // A token of the library, which nothing follows.
    *mut c_void => |source| ptr::without_provenance_mut(usize::from(source.byte()));
    *mut bool => |source| source.place().cast();
    *mut c_int => |source| source.place().cast();
    *mut u32 => |source| source.place().cast();
    *mut u64 => |source| source.place().cast();
    *mut i64 => |source| source.place().cast();
    *mut f64 => |source| source.place().cast();
    *mut usize => |source| source.place().cast();
    *mut *const c_char => |source| source.place().cast();
    *mut *const c_void => |source| source.place().cast();
    *mut *mut c_void => |source| source.place().cast();
    *mut *const i64 => |source| source.place().cast();
}
