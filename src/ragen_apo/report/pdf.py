"""A page of the report as PDF, by WeasyPrint (the extra `pdf`)."""

from __future__ import annotations

from ragen_apo.errors import ConfigError


def require_pdf() -> None:
    """Raises ConfigError where WeasyPrint or what it needs of the system is not installed."""
    try:
        import weasyprint  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a PDF needs WeasyPrint, not installed here; run `pip install 'ragen-apo[pdf]'`"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"WeasyPrint finds no Pango ({error}); install the system's package of it, such as "
            "libpango-1.0-0 with libpangoft2-1.0-0"
        ) from error


def pdf_of_page(html: str) -> bytes:
    """The page on A4. It is read as it stands: no file and no address is opened.

    Raises ConfigError as `require_pdf`.
    """
    require_pdf()
    from weasyprint import HTML
    from weasyprint.urls import URLFetcher

    only_its_own = URLFetcher(allowed_protocols=("data",), fail_on_errors=True)
    content = HTML(string=html, url_fetcher=only_its_own).write_pdf()
    return content or b""
