// alike.hpp - compares two declarations as calls: equally many arguments, each of the same size and class.
#pragma once
#include <type_traits>

template <class A, class B> constexpr bool alike()
{
    constexpr bool pointers = std::is_pointer_v<A> && std::is_pointer_v<B>;
    constexpr bool numbers = (std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>);
    constexpr bool structures = std::is_class_v<A> && std::is_class_v<B>;
    constexpr bool floats = std::is_floating_point_v<A> && std::is_floating_point_v<B>;
    if constexpr (std::is_void_v<A> || std::is_void_v<B>)
        return std::is_void_v<A> && std::is_void_v<B>;
    else
        return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) && (pointers || numbers || structures || floats);
}

// Pointers to data must point at alike types (void is alike to all, a structure to its counterpart).
template <class A, class B> constexpr bool alike_argument()
{
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
        using X = std::remove_cv_t<std::remove_pointer_t<A>>;
        using Y = std::remove_cv_t<std::remove_pointer_t<B>>;
        constexpr bool opaque = std::is_void_v<X> || std::is_void_v<Y> || std::is_class_v<X> || std::is_class_v<Y>;
        if constexpr (opaque)
            return true;
        else
            return alike_argument<X, Y>();
    } else
        return alike<A, B>();
}

template <class R, class... A, class S, class... B> constexpr bool alike_functions(R (*)(A...), S (*)(B...))
{
    if constexpr (sizeof...(A) != sizeof...(B))
        return false;
    else
        return alike<R, S>() && (alike_argument<A, B>() && ...);
}
