//! Enums without data whose values have names in protocols, options or labels of metrics.

/// Defines an enum by a table of its values and their names, the constant `ALL`, and a function
/// that returns the name.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$attribute:meta])*
        pub enum $enum:ident {
            $($(#[$of_variant:meta])* $variant:ident $(= $number:literal)? => $name:literal,)+
        }
        $(#[$of_function:meta])*
        pub fn $function:ident;
    ) => {
        $(#[$attribute])*
        pub enum $enum {
            $($(#[$of_variant])* $variant $(= $number)?,)+
        }

        impl $enum {
            /// All values, in order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            $(#[$of_function])*
            pub const fn $function(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}
