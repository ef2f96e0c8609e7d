//! A server that sleeps, and wakes.

use super::*;

#[tokio::test]
async fn a_server_sleeps_and_a_request_wakes_it() {
    let server = Options::of(&["a"], 1).start().await;
    let asleep = async || get(server.address, "/is_sleeping").await.json();
    server.asks_and_is_right(0).await;
    assert_eq!(asleep().await, json!({"is_sleeping": false}));
    let tokens = server.counter("corella_generation_tokens_total", "a").await;
    assert_eq!(tokens, Some(5.0));
    let slept = post(server.address, "/sleep?level=1", &json!({})).await;
    assert_eq!((slept.status, slept.text()), (200, ""));
    assert_eq!(asleep().await, json!({"is_sleeping": true}));
    assert_eq!(
        get(server.address, "/api/ps").await.json(),
        json!({"models": []})
    );
    assert_eq!(get(server.address, "/health").await.status, 200);
    assert_eq!(get(server.address, "/ready").await.status, 200);
    assert_eq!(
        get(server.address, "/props").await.error()["code"],
        "model_asleep"
    );
    // The counts of a model that sleeps stay.
    let steps = server.counter("corella_steps_total", "a").await;
    assert_eq!(
        server.counter("corella_generation_tokens_total", "a").await,
        tokens
    );
    server.asks_and_is_right(0).await;
    assert_eq!(asleep().await, json!({"is_sleeping": false}));
    assert_eq!(
        server.counter("corella_generation_tokens_total", "a").await,
        Some(10.0)
    );
    let later = server.counter("corella_steps_total", "a").await;
    assert!(later > steps, "{steps:?} {later:?}");
    assert_eq!(server.loads(), [0, 0]);
}

#[tokio::test]
async fn a_sleeping_server_is_woken() {
    let server = Options::of(&["a", "b"], 2).start().await;
    server.asks_and_is_right(1).await;
    assert_eq!(
        post(server.address, "/sleep?level=2", &json!({}))
            .await
            .status,
        200
    );
    assert_eq!(server.states().await, ["unloaded", "unloaded"]);
    assert_eq!(
        post(server.address, "/wake_up", &json!({})).await.status,
        200
    );
    assert_eq!(server.states().await, ["unloaded", "loaded"]);
    let refused = post(server.address, "/sleep?level=3", &json!({})).await;
    assert_eq!(
        (refused.status, &refused.error()["param"]),
        (400, &json!("level"))
    );
    let refused = post(server.address, "/wake_up?tags=weights", &json!({})).await;
    assert_eq!(
        (refused.status, &refused.error()["param"]),
        (400, &json!("tags"))
    );
}

/// llama-swap's helper for vLLM sends the level in a body, and wakes by an empty one.
#[tokio::test]
async fn the_second_level_of_sleep_drops_the_page_cache() {
    let server = Options::of(&["a", "b"], 2).start().await;
    server.asks_and_is_right(0).await;
    let dropped = || server.loader.dropped.lock().expect("no panic").clone();
    for (path, body) in [
        ("/sleep", json!({"level": 1})),
        ("/sleep?level=1", json!({"level": 2})),
    ] {
        let slept = post(server.address, path, &body).await;
        assert_eq!((slept.status, slept.text()), (200, ""));
        assert_eq!(dropped(), [] as [usize; 0], "{path}");
        let woken = post_bytes(server.address, "/wake_up", b"").await;
        assert_eq!(woken.status, 200, "{}", woken.text());
    }
    let slept = post(server.address, "/sleep", &json!({"level": 2})).await;
    assert_eq!(slept.status, 200, "{}", slept.text());
    // The other model may have been loaded before.
    assert_eq!(dropped(), [0, 1]);
    for (path, body) in [
        ("/sleep?level=3", json!({})),
        ("/sleep", json!({"level": 0})),
    ] {
        let refused = post(server.address, path, &body).await;
        assert_eq!(refused.error()["param"], "level", "{path}");
    }
}

/// In whichever order the server takes the three requests, none of them is lost.
#[tokio::test]
async fn a_request_that_meets_a_model_on_its_way_to_sleep_is_answered() {
    let server = Options::of(&["a"], 1).start().await;
    let gate = &server.loader.mocks[0].gate;
    gate.close();
    let body = ModelServer::body("a");
    let mut first = open_post(server.address, "/v1/completions", &body).await;
    server.reaches(&["loaded"]).await;
    let mut sleep = open_post(server.address, "/sleep", &json!({})).await;
    let mut second = open_post(server.address, "/v1/completions", &body).await;
    gate.open();
    for request in [&mut first, &mut sleep, &mut second] {
        assert_eq!(read_reply(request).await.status, 200);
    }
}

#[tokio::test]
async fn a_sleep_that_is_cancelled_ends() {
    let server = Options::of(&["a"], 1).start().await;
    let gate = server.loader.mocks[0].gate.clone();
    let _end = OpenAtEnd(gate.clone());
    gate.close();
    let mut running = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded"]).await;
    let address = server.address;
    let sleep = tokio::spawn(async move { post(address, "/sleep", &json!({})).await });
    // The server may take the sleep at any time.
    wait_until_asked("the sleep has ended", async || {
        let woken = post(server.address, "/wake_up", &json!({})).await;
        assert_eq!(woken.status, 200, "{}", woken.text());
        sleep.is_finished()
    })
    .await;
    assert_eq!(sleep.await.expect("no panic").status, 200);
    gate.open();
    assert_eq!(read_reply(&mut running).await.status, 200);
    assert_eq!(server.states().await, ["loaded"]);
}

#[tokio::test]
async fn a_drain_ends_the_wait_for_a_sleep() {
    let server = Options::of(&["a"], 1).start().await;
    let gate = server.loader.mocks[0].gate.clone();
    let _end = OpenAtEnd(gate.clone());
    gate.close();
    let mut running = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded"]).await;
    server.runs("a").await;
    let mut sleep = open_post(server.address, "/sleep", &json!({})).await;
    server.shutdown.try_send(()).expect("it runs");
    assert_eq!(read_reply(&mut sleep).await.error()["code"], "draining");
    gate.open();
    assert_eq!(read_reply(&mut running).await.status, 200);
}

#[tokio::test]
async fn a_server_that_wakes_does_not_wait_for_other_models() {
    let server = Options::of(&["a", "b"], 1).start().await;
    let gate = server.loader.mocks[0].gate.clone();
    let _end = OpenAtEnd(gate.clone());
    gate.close();
    let mut first = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded", "unloaded"]).await;
    let mut second = open_post(server.address, "/v1/completions", &ModelServer::body("b")).await;
    server.reaches(&["loaded", "loading"]).await;
    let woken = post(server.address, "/wake_up", &json!({})).await;
    assert_eq!(woken.status, 200, "{}", woken.text());
    gate.open();
    assert_eq!(read_reply(&mut first).await.status, 200);
    assert_eq!(read_reply(&mut second).await.status, 200);
}
