# The operator and the pods of its sales, from static binaries that "make build" made. CA certificates are for TLS to the
# database; time zone data is for whoever reads times in a zone of their own.
FROM scratch
COPY dist/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY dist/zoneinfo.zip /usr/local/go/lib/time/zoneinfo.zip
COPY dist/manager dist/reserver /
ENV ZONEINFO=/usr/local/go/lib/time/zoneinfo.zip
USER 65532:65532
ENTRYPOINT ["/manager"]
